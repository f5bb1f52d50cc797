"""The pair of containers: what runs against what is wanted, and starting both ranks or none."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from sparkserve.cluster import ROLES, Cluster, Deployment, Node, Role
from sparkserve.container import ContainerSpec, check_resolved, with_secrets
from sparkserve.docker_form import create_arguments
from sparkserve.engine_facts import ContainerFacts, Facts, gather, parse_memory
from sparkserve.engine_stop import Stopping, all_or_nothing, stop
from sparkserve.engine_watch import OLD_PAIR, READY, STEP, Launch, wait_until_ready
from sparkserve.errors import EXIT_NOT_READY, Failures, SparkserveError
from sparkserve.parameters import read_secrets
from sparkserve.plan import ApplyReport, Change, Work, key_of
from sparkserve.readiness import wait_for_worker
from sparkserve.settings import read_secret
from sparkserve.source_checks import require_sources

__all__ = ["Facts", "Launch", "gather", "new_run", "plan", "plan_stop"]
DROP_CACHES = "/proc/sys/vm/drop_caches"
_MEMINFO = "/proc/meminfo"
_LEFTOVER = key_of("head", STEP, OLD_PAIR)
# The daemon's own words, and what they mean for the owner of the pair.
_REFUSALS = (
    (r"exec: .*(no such file|not found|permission denied)", "image_entrypoint", "the image cannot run its entry point",
     "`sparkserve build`"),
    (r"could not select device driver|nvidia-container", "gpu_refused", "Docker cannot give the container the GPU",
     "`docker run --rm --gpus all IMAGE nvidia-smi`; the NVIDIA container toolkit may be missing"),
    (r"error gathering device information", "device_missing", "a device of the recipe is missing",
     "`ls /dev/infiniband` on that node; `devices` of the recipe's container"),
)  # fmt: skip


def new_run() -> str:
    """Name a run: its time, so that runs sort also within a second, and a few random digits."""
    milliseconds = f"{datetime.now().astimezone():%Y%m%dT%H%M%S.%f}"[:-3]
    return f"{milliseconds}-{secrets.token_hex(2)}"


def plan(deployment: Deployment, facts: Mapping[Role, Facts], launch: Launch) -> list[Change]:
    """Plan what makes the pair run as wanted; a pair is left as it is, waited for, or replaced as a whole."""
    running = _pair_as_wanted(facts, launch)
    if running and launch.seen in ("running", "unknown"):
        return []
    if running and launch.seen == "starting":
        return [_ready(deployment, replace(launch, run=running), ())]
    worker = _create(deployment, "worker", facts, launch, (*launch.needs, _LEFTOVER))
    head = _create(deployment, "head", facts, launch, (*launch.needs, worker.key))
    removal = [_remove_old(deployment, facts, launch)] if any(found.containers for found in facts.values()) else []
    is_older = any("older settings" in _differences(facts, role, launch) for role in ROLES)
    # Whether a pair of older settings answers was not asked: it goes either way.
    before = "not asked, runs with older settings" if is_older else "no answer"
    return [*removal, worker, head, _ready(deployment, launch, (head.key,), before)]


def foreign_refusals(facts: Mapping[Role, Facts]) -> tuple[SparkserveError, ...]:
    """Refuse to start where a container that is not ours has one of our names."""
    return tuple(
        SparkserveError(
            "name_taken",
            f"container {found.name} ({found.state}, image {found.image}) has our name but is not ours",
            f"docker rename {found.name} SOMETHING-ELSE, or remove it",
            role,
            exit_code=EXIT_NOT_READY,
        )
        for role, seen in facts.items()
        for found in seen.foreign
    )


def _pair_as_wanted(facts: Mapping[Role, Facts], launch: Launch) -> str:
    """Give the run of a pair that is whole and as wanted; empty otherwise."""
    runs = set()
    for rank, role in enumerate(ROLES):
        ours = facts[role].containers
        if len(ours) != 1 or _difference(ours[0], rank, launch.specs[role]):
            return ""
        runs.add(ours[0].run)
    return runs.pop() if len(runs) == 1 else ""


def _difference(container: ContainerFacts, rank: int, spec: ContainerSpec) -> str:
    if container.rank != rank:
        return f"is rank {container.rank}"
    if not container.is_alive:
        return container.describe()
    return "" if container.spec == spec.digest else f"runs with older settings, spec {_short(container.spec)}"


def _state(facts: Mapping[Role, Facts], role: Role, launch: Launch) -> str:
    """Say how a node's rank differs from what is wanted."""
    ours = facts[role].containers
    if not ours:
        return "absent"
    differences = {each: _differences(facts, each, launch) for each in ROLES}
    is_broken = launch.seen in ("stalled", "degraded") and not any(differences.values())
    return differences[role] or ("running, does not serve" if is_broken else "running, its peer is not as wanted")


def _differences(facts: Mapping[Role, Facts], role: Role, launch: Launch) -> str:
    rank, spec = ROLES.index(role), launch.specs[role]
    return "; ".join(filter(None, (_difference(container, rank, spec) for container in facts[role].containers)))


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12] or "unknown"


# -- the changes ------------------------------------------------------------------------------------------------------


def _remove_old(deployment: Deployment, facts: Mapping[Role, Facts], launch: Launch) -> Change:
    """Remove both ranks of an earlier run, rank 0 first: a stale head would capture a new worker."""
    before = "; ".join(f"{role}: {_state(facts, role, launch)}" for role in ROLES)

    def action(work: Work) -> str:
        needed, runs_dir, secrets = _needed_gib(deployment, launch), launch.runs_dir, launch.secrets
        stopping = Stopping(runs_dir, needed_gib=needed, secrets=secrets, tell=work.note, check=work.check)
        unproved = require_sources(deployment.cluster, launch)
        work.check()
        with all_or_nothing(deployment.cluster, runs_dir, secrets):
            return stop(deployment.cluster, stopping) + unproved

    return Change("head", STEP, OLD_PAIR, before, "gone", action, launch.needs, "start")


def _create(
    deployment: Deployment, role: Role, facts: Mapping[Role, Facts], launch: Launch, needs: tuple[str, ...]
) -> Change:
    spec, cluster = launch.specs[role].of_run(launch.run), deployment.cluster
    had_pair = any(found.containers for found in facts.values())

    def action(work: Work) -> str:
        unproved = "" if had_pair or role == "head" else require_sources(cluster, launch)
        with all_or_nothing(cluster, launch.runs_dir, launch.secrets):
            # The worker comes first: by then both nodes must have free pages.
            cache = f"; {prepare_memory(deployment, launch, just_ended=had_pair)}" if role == "worker" else ""
            if role == "head":
                wait_for_worker(deployment, launch.deadline(deployment.recipe), work)
            proof = create(cluster.node(role), with_secrets(spec, read_secrets(deployment.settings))) + cache
            work.check()
        return proof + unproved

    after = f"running, spec {_short(spec.digest)}"
    return Change(role, STEP, spec.name, _state(facts, role, launch), after, action, needs, "start")


def _ready(deployment: Deployment, launch: Launch, needs: tuple[str, ...], before: str = "no answer") -> Change:
    def action(work: Work) -> str:
        return wait_until_ready(deployment.cluster, deployment.recipe, launch, work)

    after = f"answers as {launch.endpoint.model}"
    return Change("head", STEP, READY, before, after, action, needs, "start")


def _needed_gib(deployment: Deployment, launch: Launch) -> float:
    return 0 if "memory" in launch.skipped_checks else deployment.recipe.memory.required_gib


def prepare_memory(deployment: Deployment, launch: Launch, *, just_ended: bool) -> str:
    """Give the driver free pages, since it takes no cached ones, and look that both nodes have what a rank needs.

    Pages are dropped only where root is ours without asking a person. Where a pair has just ended, memory may still
    be on its way back: that it is short is told then, and no reason to leave the owner without any pair.
    """
    needed = _needed_gib(deployment, launch)

    def drop(node: Node) -> tuple[bool, float]:
        dropped = _drop_caches(node, deployment.settings.sudo_password_file)
        meminfo = node.session.ask("facts", files=[_MEMINFO])["files"][_MEMINFO] or ""
        return dropped, parse_memory(meminfo).available / 2**30

    found = deployment.cluster.on_both(drop)
    short = [
        SparkserveError(
            "memory_short",
            f"{available:.1f} GiB of memory available; needed before a start: {needed:g} GiB",
            "close other programs: `ps aux --sort=-rss | head` shows the largest",
            role,
            exit_code=EXIT_NOT_READY,
        )
        for role, (_, available) in found.items()
        if available < needed
    ]
    if short and not just_ended:
        raise Failures(short)
    kept = [role for role, (dropped, _) in found.items() if not dropped]
    pages = f"page cache kept on {' and '.join(kept)}: sudo asks for a password" if kept else "page caches dropped"
    return "; ".join([pages, *map(str, short)])


def _drop_caches(node: Node, password_file: Path | None) -> bool:
    """Whether the pages could be dropped; a password that is missing or wrong is no reason to fail."""
    with contextlib.suppress(SparkserveError):
        if node.host.sudo_password is None and password_file is not None:
            node.host.sudo_password = read_secret(password_file, "the sudo password")
    try:
        node.host.sudo(["tee", DROP_CACHES], stdin=b"3\n")
    except SparkserveError:
        return False
    return True


def has_removed(report: ApplyReport) -> bool:
    """Whether a start took an earlier pair away."""
    return any(item.change.key == _LEFTOVER for item in report.applied)


def create(node: Node, spec: ContainerSpec) -> str:
    """Create and start one rank's container; a container that cannot be started is removed again."""
    from sparkserve.docker_client import explained

    check_resolved(spec)
    node.session.ask("mkdir", paths=[mount.source for mount in spec.mounts if not (mount.read_only or mount.owners)])
    container, host = create_arguments(spec)
    try:
        with explained(node.role):
            api = node.docker.api
            made = api.create_container(**container, host_config=api.create_host_config(**host))
            api.start(made["Id"])
    except SparkserveError as error:
        raise _translated(error, spec) from error
    return f"container {made['Id'][:12]} runs, spec {_short(spec.digest)}"


def _translated(error: SparkserveError, spec: ContainerSpec) -> SparkserveError:
    for pattern, code, message, hint in _REFUSALS:
        if re.search(pattern, error.details):
            return SparkserveError(code, f"{spec.name}: {message}", hint, error.node, error.details)
    return error


# -- stop -------------------------------------------------------------------------------------------------------------


def plan_stop(cluster: Cluster, facts: Mapping[Role, Facts], stopping: Stopping) -> list[Change]:
    """Plan the end of everything of ours as one change; nothing of ours on two nodes that were asked is no change."""
    found = [f"{one.name} on {role}: {one.describe()}" for role, seen in facts.items() for one in seen.containers]
    if not found and len(facts) == len(ROLES):
        return []

    def action(work: Work) -> str:
        return stop(cluster, replace(stopping, tell=work.note, check=work.check))

    unseen = [f"{role}: could not be asked" for role in ROLES if role not in facts]
    return [Change("head", "stop", "both ranks", "; ".join([*found, *unseen]), "gone", action)]
