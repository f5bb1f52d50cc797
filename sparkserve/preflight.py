"""The checks that must hold before a plan is carried out: what it needs of both nodes is looked at, then judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from sparkserve import host_checks, need_checks, pair_checks, system, takeover_facts, tuning, weights
from sparkserve.checks import Check, DiskNeed, Subject
from sparkserve.cluster import ROLES, Deployment, Node, Role
from sparkserve.errors import SparkserveError
from sparkserve.parameters import decide_ports
from sparkserve.plan import Plan
from sparkserve.planning import Starting, is_warm
from sparkserve.source_checks import check_sources
from sparkserve.takeover import find_pair, find_ranks


def judge(subject: Subject, *, starting: bool = True) -> list[Check]:
    """Apply every rule; those that only a start needs are left out where nothing is started."""
    rules, gpus = host_checks.BASICS, subject.recipe.container.gpus
    of_pair = [need_checks.check_disks, need_checks.check_sudo]
    if starting:
        rules += host_checks.BEFORE_START + (host_checks.OF_GPUS if gpus else ())
        of_pair += [need_checks.check_ports, need_checks.check_api_key, pair_checks.check_link]
        of_pair += [pair_checks.check_same_machine, pair_checks.check_alike, pair_checks.check_clock]
    of_nodes = [rule(subject, role, facts) for rule in rules for role, facts in subject.system.items()]
    return of_nodes + [check for rule in of_pair for check in rule(subject)]


def preflight(deployment: Deployment, wanted: Plan, start: Starting | None) -> list[Check]:
    """Check all that the planned changes need, with every failure found at once."""
    cluster, changes = deployment.cluster, wanted.changes
    created = [change for change in changes if change.step == "start" and change.resource != "ready"]
    # An interrupt waits for what looks from inside of containers, so that none of those is left.
    with ThreadPoolExecutor(1) as aside:
        specs = start.launch.specs if start is not None and created and not start.launch.needs else None
        sources = aside.submit(cluster.on_both, lambda node: check_sources(node, specs[node.role])) if specs else None
        ports = tuple(decide_ports(deployment.settings, deployment.recipe).named.values())
        rooted = tuning.root_commands(deployment.recipe.tuning.sysctl)
        roles = {change.node for change in changes if change.lane == "sudo"}
        subject = Subject(
            deployment.settings,
            deployment.recipe,
            cluster.on_both(lambda node: system.gather(node, ports, rooted if node.role in roles else ())),
            start.links if start is not None else {},
            tuple(disk_needs(deployment, wanted)),
            {node.role: node.host.sudo_password is not None for node in cluster.nodes if node.role in roles},
        )
        found = judge(subject, starting=bool(created))
        if any("absent" not in change.before for change in created):
            # What an old pair holds comes back when it is gone; then memory is looked at again.
            found = [check for check in found if check.id != "memory"]
        found += check_foreign_containers(cluster.on_both(takeover_facts.gather)) if created else []
    return [*found, *(sources.result().values() if sources is not None else ())]


def check_foreign_containers(facts: Mapping[Role, takeover_facts.Facts]) -> list[Check]:
    """Refuse to start beside ranks of somebody else's script, by name, with what is missing of their pair.

    Others that were given what a rank needs are only told; those on the host's network are told from Docker's list.
    """
    ranks = [rank for found in facts.values() for rank in find_ranks(found.running) if not rank.running.is_ours]
    way = "`sparkserve init --from-running` writes its recipe"
    try:
        if ranks and facts.keys() == {*ROLES}:  # of a node that could not be looked at nothing is missing
            find_pair(facts)
    except SparkserveError as error:
        way = f"to take it over: {error.hint}; then {way}"
    checks = []
    for rank in ranks:
        observed = f"{rank.running.name} runs rank {rank.rank} of {rank.family.label}, and is not ours"
        hint = f"{rank.running.stop_hint}, or your own script's stop; {way}"
        checks.append(Check("containers", rank.running.role, "fail", observed, "no other pair", hint))
    named = [rank.running for rank in ranks]
    for one in (one for found in facts.values() for one in found.running):
        is_told = one.is_ours or one in named or one.options.get("network_mode") == "host"
        if one.devices_of_a_rank and not is_told:
            observed, needed = (
                f"{one.name} was given {' and '.join(one.devices_of_a_rank)}",
                "devices for the rank alone",
            )
            checks.append(Check("containers", one.role, "warn", observed, needed, one.stop_hint))
    return checks


def disk_needs(deployment: Deployment, wanted: Plan) -> list[DiskNeed]:
    """Add up what the planned changes will write; before weights are fetched, also what `up` will write after them."""
    planned = {change.step for change in wanted.changes}
    fetches = not planned.isdisjoint({"download", "sync"})
    steps: Counter[tuple[str, str]] = Counter()
    for change in wanted.changes + (wanted.later if fetches else ()):
        steps[change.node, change.step] += change.size

    def needs_of(node: Node) -> list[DiskNeed]:
        needs = []
        if {(node.role, "download"), (node.role, "sync")} & steps.keys():
            missing = weights.bytes_missing(deployment.lock, weights.gather(node, deployment.lock))
            needs.append(DiskNeed(node.role, "models", missing, "weights"))
        needs.append(DiskNeed(node.role, "cache", steps[node.role, "derive"], "derived files"))
        # What Docker saves it writes to its own directory first; what it loads it holds twice, packed and unpacked.
        image_bytes = steps[node.role, "build"] + steps["worker", "ship"] * (1 if node.role == "head" else 2)
        needs.append(DiskNeed(node.role, "docker", image_bytes, "engine image"))
        return needs + (first_start_needs(deployment, node) if fetches or "start" in planned else [])

    found = deployment.cluster.on_both(needs_of)
    return [need for role in ROLES for need in found[role]]


def first_start_needs(deployment: Deployment, node: Node) -> list[DiskNeed]:
    """Tell what a first start writes to a node that had none yet."""
    size = deployment.recipe.memory.first_start_disk_bytes
    if not size or is_warm(deployment, node):
        return []
    return [DiskNeed(node.role, "cache", size, "what the first start writes")]
