"""From facts of both nodes to one plan of the whole line, and the preflight that must hold before it is carried out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import SecretStr

from sparkserve import chat_template, checks, derive, engine, image, link, sync, system, tuning, weights
from sparkserve.blueprint import build_specs
from sparkserve.cluster import Deployment, Node, Role
from sparkserve.container import ContainerSpec, check_resolved
from sparkserve.endpoint import open_endpoint
from sparkserve.engine_watch import Launch
from sparkserve.parameters import decide_ports
from sparkserve.plan import Change
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


def plan_tuning(deployment: Deployment) -> list[Change]:
    """Plan the host memory settings."""
    sysctls = deployment.recipe.tuning.sysctl
    return tuning.plan(deployment, deployment.cluster.on_both(lambda node: tuning.gather(node, sysctls)))


def plan_start(deployment: Deployment, runs_dir: Path, earlier: Iterable[Change]) -> tuple[list[Change], Links]:
    """Plan the start of both ranks, which needs every earlier change."""
    links = deployment.cluster.on_both(link.gather)
    launch = Launch(
        specs=build_specs(deployment, links),
        run=engine.new_run(),
        endpoint=open_endpoint(deployment.settings, deployment.recipe),
        runs_dir=runs_dir,
        first_start=not all(deployment.cluster.on_both(lambda node: is_warm(deployment, node)).values()),
        needs=tuple(change.key for change in earlier),
        secrets=secrets_of(deployment),
    )
    question = ask_status(deployment, launch.specs, runs_dir.parent)
    launch = replace(launch, serving=serving_of(look(question).verdict))
    tag = image.tag_of(deployment.recipe, deployment.lock)
    facts = deployment.cluster.on_both(lambda node: engine.gather(node, tag))
    changes = engine.plan(deployment, facts, launch)
    for spec in launch.specs.values() if changes else ():
        check_resolved(spec)
    return changes, links


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


def preflight(deployment: Deployment, changes: Sequence[Change], links: Links | None) -> list[checks.Check]:
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
    if starts and links is not None:
        rdma = "/dev/infiniband" in deployment.recipe.container.devices
        found += checks.check_link(deployment.settings, links, rdma=rdma)
        created = [change for change in starts if change.resource != "ready"]
        if created and all("absent" in change.before for change in created):
            found += checks.check_ports(both, facts)
            found += checks.check_memory(deployment.recipe, facts)
    return found


def _is_rooted(change: Change, node: Node) -> bool:
    return change.lane == "sudo" and change.node == node.role


def disk_needs(deployment: Deployment, changes: Sequence[Change]) -> list[checks.DiskNeed]:
    """Add up what the planned changes will write, and what a first start writes."""
    places = {"download": "models", "sync": "models", "derive": "cache", "build": "docker", "ship": "docker"}
    names = {"models": "weights", "cache": "derived files", "docker": "engine image"}
    needs = []
    for node in deployment.cluster.nodes:
        for place, name in names.items():
            mine = [change for change in changes if change.node == node.role and places.get(change.step) == place]
            needs.append(checks.DiskNeed(node.role, place, sum(change.size for change in mine), name))
        first = deployment.recipe.memory.first_start_disk_bytes
        starts = any(change.step == "start" for change in changes)
        if starts and first and not is_warm(deployment, node):
            needs.append(checks.DiskNeed(node.role, "cache", first, "what the first start writes"))
    return needs
