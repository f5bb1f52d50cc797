"""Ending the ranks: rank 0 first, both logs kept, and no "stopped" before each node said that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from sparkserve.cluster import Cluster, Node, Role
from sparkserve.engine_facts import ContainerFacts, Facts, gather
from sparkserve.engine_logs import save_log
from sparkserve.errors import Failures, SparkserveError

_KILL_SECONDS = 15.0
_HASTY_SECONDS = 1.0
_MEMORY_SECONDS = 60.0
# Memory counts as settled once so many looks in a row see it grow by less than this share of all memory.
_STILL = 0.005
_STILL_LOOKS = 2


def _say_nothing(_text: str) -> None:
    """Be the listener of a caller that wants none."""


def _go_on() -> None:
    """Be the check of a caller that cannot be interrupted."""


@dataclass(frozen=True)
class Stopping:
    """How to end: where logs are kept, by force or in order, whom to tell, and whether to go on.

    `seconds` is how long an orderly end may take; None leaves it to what each container was made with.
    """

    runs_dir: Path
    force: bool = False
    seconds: float | None = None
    secrets: tuple[SecretStr | None, ...] = ()
    tell: Callable[[str], None] = _say_nothing
    check: Callable[[], None] = _go_on


@dataclass(frozen=True)
class Ended:
    """One container that was ended and removed."""

    role: Role
    name: str
    how: str
    seconds: float


@dataclass
class StopReport:
    """What was ended, and MemAvailable of each node before and after, in bytes."""

    ended: list[Ended] = field(default_factory=list)
    memory: dict[Role, tuple[int, int]] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """Say it in one line."""
        if not self.ended:
            return "nothing of ours was running"
        freed = sum(after - before for before, after in self.memory.values())
        names = ", ".join(f"{ended.name} on {ended.role} ({ended.how}, {ended.seconds:.1f} s)" for ended in self.ended)
        return f"{names}; nothing of ours is left; {freed / 2**30:+.1f} GiB available on both nodes together"


def stop(cluster: Cluster, stopping: Stopping) -> StopReport:
    """End everything of ours on both nodes; raises unless each node was asked and answered that nothing is left."""
    before, errors = cluster.try_both(gather)
    report = StopReport()
    for rank in (0, 1, None):
        for role, facts in before.items():
            for container in facts.containers:
                if container.rank == rank:
                    _end_noting(cluster.node(role), container, stopping, report, errors)
    after = _confirm(cluster, errors)
    had_run = any(container.is_running for facts in before.values() for container in facts.containers)
    settled = _settle(cluster, after, stopping) if had_run else after
    report.memory = {role: (before[role].memory.available, facts.memory.available) for role, facts in settled.items()}
    if errors:
        asked = [f"{role}: was asked, nothing of ours is left there" for role in after if role not in errors]
        for error in errors.values():
            error.details = "\n".join(filter(None, [error.details, *asked]))
        raise Failures(list(errors.values()))
    return report


def _end_noting(
    node: Node, container: ContainerFacts, stopping: Stopping, report: StopReport, errors: dict[Role, SparkserveError]
) -> None:
    """End one container; a failure is kept, so that the other rank is still ended."""
    begun = time.monotonic()
    try:
        how = end_container(node, container, stopping)
    except SparkserveError as error:
        error.node = error.node or node.role
        errors.setdefault(node.role, error)
        return
    report.ended.append(Ended(node.role, container.name, how, time.monotonic() - begun))


def end_container(node: Node, container: ContainerFacts, stopping: Stopping) -> str:
    """End a container in order or by force, keep its log, remove it; gives how it ended."""
    how = "was not running"
    if container.is_running:
        by_force = stopping.force or container.hangs
        signal = "SIGKILL" if by_force else container.stop_signal
        orderly = container.stop_seconds if stopping.seconds is None else stopping.seconds
        seconds = _KILL_SECONDS if by_force else orderly
        stopping.tell(f"{container.name}: {signal}, up to {seconds:g} s")
        _signal(node, container, signal)
        how = "killed" if by_force else "ended in order"
        if not _wait_for_end(node, container, seconds, stopping):
            stopping.tell(f"{container.name}: still there after {seconds:g} s, killing it")
            _signal(node, container, "SIGKILL")
            how = f"killed after {seconds:g} s"
            _wait_for_end(node, container, _KILL_SECONDS, stopping)
    _keep_log(node, container, stopping)
    _remove(node, container)
    return how


def _keep_log(node: Node, container: ContainerFacts, stopping: Stopping) -> None:
    """Keep the log where that is possible; a full disk must not leave a rank running."""
    try:
        save_log(node, container, stopping.runs_dir, stopping.secrets)
    except (OSError, SparkserveError) as error:
        stopping.tell(f"{container.name}: its log could not be kept: {error}")


def _signal(node: Node, container: ContainerFacts, signal: str) -> None:
    from sparkserve.docker_client import explained

    try:
        with explained(node.role):
            node.docker.api.kill(container.id, signal)
    except SparkserveError as error:
        # It ended by itself since we looked: rank 1 often does when rank 0 goes.
        if not any(words in error.details for words in ("is not running", "No such container")):
            raise


def _remove(node: Node, container: ContainerFacts) -> None:
    from sparkserve.docker_client import explained

    try:
        with explained(node.role):
            node.docker.api.remove_container(container.id, force=True)
    except SparkserveError as error:
        if not any(words in error.details for words in ("already in progress", "No such container")):
            raise


def _wait_for_end(node: Node, container: ContainerFacts, seconds: float, stopping: Stopping) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        stopping.check()
        now = next((found for found in gather(node).containers if found.id == container.id), None)
        if now is None or not now.is_running:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.25)


def _confirm(cluster: Cluster, errors: dict[Role, SparkserveError]) -> dict[Role, Facts]:
    """Ask each node whether anything of ours is left, and note every node that says so or says nothing."""
    after, silent = cluster.try_both(gather)
    for role, error in silent.items():
        errors[role] = errors.get(role) or error
    for role, facts in after.items():
        if facts.containers:
            names = ", ".join(f"{container.name} ({container.describe()})" for container in facts.containers)
            error = SparkserveError("still_there", f"still there: {names}", "`sparkserve stop --force`", role)
            errors.setdefault(role, error)
    return after


def _settle(cluster: Cluster, facts: Mapping[Role, Facts], stopping: Stopping) -> Mapping[Role, Facts]:
    """Wait until the memory of both nodes stops coming back: the kernel frees 100 GB in seconds, not at once."""
    deadline, still = time.monotonic() + _MEMORY_SECONDS, 0
    while still < _STILL_LOOKS and time.monotonic() < deadline:
        stopping.check()
        time.sleep(0.4)
        now = {role: found for role, found in cluster.try_both(gather)[0].items() if role in facts}
        grew = [now[role].memory.available - facts[role].memory.available for role in now]
        rests = all(growth < _STILL * facts[role].memory.total for role, growth in zip(now, grew, strict=True))
        still = still + 1 if rests else 0
        facts = {**facts, **now}
        if not rests:
            available = " / ".join(f"{found.memory.available / 2**30:.1f}" for found in facts.values())
            stopping.tell(f"memory comes back: {available} GiB available")
    return facts


def abandon(cluster: Cluster, stopping: Stopping) -> list[SparkserveError]:
    """End and remove both ranks at once after a start that failed; gives what could not be cleaned up."""
    hasty = Stopping(stopping.runs_dir, seconds=_HASTY_SECONDS, secrets=stopping.secrets)

    def clear(node: Node) -> None:
        for container in gather(node).containers:
            end_container(node, container, hasty)

    errors = cluster.try_both(clear)[1]
    _confirm(cluster, errors)
    return list(errors.values())
