"""From facts of both nodes to one plan of the whole line, and the preflight that must hold before it is carried out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import SecretStr

from sparkserve import adoption, chat_template, checks, derive, engine, image, link, sync, system, tuning, weights
from sparkserve.blueprint import build_specs
from sparkserve.cluster import Deployment, Node, Role
from sparkserve.container import ContainerSpec, check_resolved
from sparkserve.endpoint import open_endpoint
from sparkserve.engine_watch import Launch
from sparkserve.errors import Failures
from sparkserve.parameters import decide_ports
from sparkserve.plan import ApplyReport, Change
from sparkserve.recipe import PLACEHOLDER, render
from sparkserve.settings import read_secret
from sparkserve.status import serving_of
from sparkserve.status_look import Question, look

Links = dict[Role, link.LinkFacts]


def secrets_of(deployment: Deployment) -> tuple[SecretStr | None, ...]:
    """List everything that must never show in a log."""
    file = deployment.settings.api_key_file
    return deployment.settings.hf_token, read_secret(file, "the API key") if file else None


def plan_preparation(deployment: Deployment) -> list[Change]:
    """Plan everything before the start; the rooms look at both nodes side by side."""
    both = deployment.cluster.on_both
    found = both(lambda node: weights.gather(node, deployment.lock))
    return [
        *weights.plan(deployment, found),
        *sync.plan(deployment, found),
        *derive.plan(deployment, both(lambda node: derive.gather(node, deployment))),
        *chat_template.plan(deployment, both(lambda node: chat_template.gather(node, deployment))),
        *image.plan(deployment, both(lambda node: image.gather(node, deployment))),
        *plan_tuning(deployment),
    ]


def look_for_weights(
    deployment: Deployment, words: Collection[str], warn: Callable[[str], None], *, only_assume: bool = False
) -> list[Change]:
    """Plan the proof of weights that are found in folders; or only assume, for this run, that they are right."""
    if not words:
        return []
    found = adoption.find(deployment, adoption.parse_folders(words, Path.cwd()))
    facts = deployment.cluster.on_both(lambda node: weights.gather(node, deployment.lock))
    for role, search in found.items():
        for problem in search.problems:
            warn(f"{role}: cannot look into {problem}")
    changes = adoption.plan(deployment, facts, found)
    if not changes:
        warn(f"nothing in {', '.join(words)} has the name and size of a file that is still wanted")
    if only_assume:
        adoption.assume(deployment, facts, found)
    return changes


def tidy_weights(deployment: Deployment, report: ApplyReport) -> None:
    """Leave no empty directories of partials where weights were written."""
    if any(item.change.step in ("download", "sync") for item in report.applied):
        deployment.cluster.on_both(lambda node: weights.tidy(node, deployment.lock))


def plan_tuning(deployment: Deployment) -> list[Change]:
    """Plan the host memory settings."""
    sysctls = deployment.recipe.tuning.sysctl
    return tuning.plan(deployment, deployment.cluster.on_both(lambda node: tuning.gather(node, sysctls)))


@dataclass(frozen=True)
class Starting:
    """A planned start: its changes, the cable as it was seen, and the run that it replaces (empty where none runs)."""

    changes: list[Change]
    links: Links
    launch: Launch
    replaces: str = ""


def plan_start(deployment: Deployment, runs_dir: Path, earlier: Iterable[Change]) -> Starting:
    """Plan the start of both ranks, which needs every earlier change."""
    links = deployment.cluster.on_both(link.gather)
    specs = build_specs(deployment, links)
    status = look(ask_status(deployment, specs, runs_dir.parent))
    if status.unseen:
        raise Failures(list(status.unseen.values()))
    launch = Launch(
        specs=specs,
        run=engine.new_run(),
        endpoint=open_endpoint(deployment.settings, deployment.recipe),
        runs_dir=runs_dir,
        first_start=not all(deployment.cluster.on_both(lambda node: is_warm(deployment, node)).values()),
        serving=serving_of(status.verdict),
        needs=tuple(change.key for change in earlier),
        secrets=secrets_of(deployment),
        kernels={role: facts.kernel for role, facts in status.facts.items()},
    )
    changes = engine.plan(deployment, status.facts, launch)
    for spec in launch.specs.values() if changes else ():
        check_resolved(spec)
    runs = {one.run for facts in status.facts.values() for one in facts.containers if one.is_running}
    running = runs.pop() if len(runs) == 1 else ""
    if all(change.resource == "ready" for change in changes):
        launch = replace(launch, run=running)
    return Starting(changes, links, launch, running)


def ask_status(deployment: Deployment, specs: Mapping[Role, ContainerSpec], state: Path) -> Question:
    """Build the question of a status: what runs, compared with what is wanted."""
    return Question(
        deployment.cluster,
        deployment.recipe,
        open_endpoint(deployment.settings, deployment.recipe),
        state / "movement.json",
        {role: spec.digest for role, spec in specs.items()},
    )


def is_warm(deployment: Deployment, node: Node) -> bool:
    """Whether a finished first start left its files on a node, so that the next one is quick and writes nothing."""
    pattern = deployment.recipe.readiness.warm_files
    if not pattern:
        return False
    values = {"cache": node.cache_dir, "weights.id": deployment.lock.weights_id, "rank": str(node.rank)}
    pattern = render(pattern, values)
    return bool(node.session.ask("facts", globs=[pattern])["globs"][pattern]) and not PLACEHOLDER.search(pattern)


def preflight(deployment: Deployment, changes: Sequence[Change], start: Starting | None) -> list[checks.Check]:
    """Check all that the planned changes need, with every failure found at once."""
    ports = decide_ports(deployment.settings, deployment.recipe)
    both = {"api": ports.api, "master": ports.master}
    facts = deployment.cluster.on_both(lambda node: system.gather(node, list(both.values())))
    found = checks.check_basics(deployment.recipe, facts)
    found += checks.check_disks(disk_needs(deployment, changes), facts)
    rooted = [node for node in deployment.cluster.nodes if any(_is_rooted(change, node) for change in changes)]
    for node in rooted:
        found.append(checks.check_sudo(facts[node.role], node.role, have_password=node.host.sudo_password is not None))
    starts = [change for change in changes if change.step == "start"]
    if starts and start is not None:
        rdma = "/dev/infiniband" in deployment.recipe.container.devices
        found += checks.check_link(deployment.settings, start.links, rdma=rdma)
        created = [change for change in starts if change.resource != "ready"]
        if created and all("absent" in change.before for change in created):
            found += checks.check_ports(both, facts)
            found += checks.check_memory(deployment.recipe, facts)
        if created and len(starts) == len(changes):
            specs = start.launch.specs
            found += checks.check_sources(deployment.cluster.on_both(lambda node: engine.look_at_sources(node, specs)))
    return found


def _is_rooted(change: Change, node: Node) -> bool:
    return change.lane == "sudo" and change.node == node.role


def disk_needs(deployment: Deployment, changes: Sequence[Change]) -> list[checks.DiskNeed]:
    """Add up what the planned changes will write, and what a first start writes."""
    steps: Counter[tuple[str, str]] = Counter()
    for change in changes:
        steps[change.node, change.step] += change.size
    starts = any(change.step == "start" for change in changes)
    needs = []
    for node in deployment.cluster.nodes:
        sizes = {step: size for (role, step), size in steps.items() if role == node.role}
        if "download" in sizes or "sync" in sizes:
            missing = weights.bytes_missing(deployment.lock, weights.gather(node, deployment.lock))
            needs.append(checks.DiskNeed(node.role, "models", missing, "weights"))
        needs.append(checks.DiskNeed(node.role, "cache", sizes.get("derive", 0), "derived files"))
        # While an image is loaded, Docker holds the stream and the unpacked layers.
        image_bytes = sizes.get("build", 0) + 2 * sizes.get("ship", 0)
        needs.append(checks.DiskNeed(node.role, "docker", image_bytes, "engine image"))
        first = deployment.recipe.memory.first_start_disk_bytes
        if starts and first and not is_warm(deployment, node):
            needs.append(checks.DiskNeed(node.role, "cache", first, "what the first start writes"))
    return needs
