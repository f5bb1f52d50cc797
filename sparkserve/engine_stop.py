"""Ending the ranks: rank 0 first, both logs kept, and no "stopped" before each node said that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from sparkserve.cluster import Cluster, Node, Role
from sparkserve.engine_facts import ContainerFacts, Facts, gather
from sparkserve.engine_logs import save_log
from sparkserve.errors import Failures, SparkserveError

_KILL_SECONDS = 15.0
_HASTY_SECONDS = 1.0
_MEMORY_SECONDS = 60.0
# So long memory that a run had at its beginning may keep us waiting before any of it comes back.
_LATE_SECONDS = 5.0
# Memory counts as settled once so many looks in a row see it grow by less than this share of all memory.
_STILL = 0.005
_STILL_LOOKS = 2
Secrets = tuple[SecretStr | None, ...]


@dataclass(frozen=True)
class Stopping:
    """How to end: where logs are kept, by force or in order, whom to tell, and whether to go on.

    `seconds` is how long an orderly end may take; None leaves it to what each container was made with. `needed_gib` is
    the memory that was available before the ranks were there.
    """

    runs_dir: Path
    force: bool = False
    seconds: float | None = None
    needed_gib: float = 0.0
    secrets: Secrets = ()
    tell: Callable[[str], None] = lambda _text: None
    check: Callable[[], None] = lambda: None


def stop(cluster: Cluster, stopping: Stopping) -> str:
    """End everything of ours on both nodes and say how; raises unless each of them answered that nothing is left."""
    before, errors = cluster.try_both(gather)
    ended: list[str] = []
    for rank in (0, 1, None):
        for role, facts in before.items():
            for container in facts.containers:
                if container.rank == rank:
                    ended += _end_noting(cluster.node(role), container, stopping, errors)
    after = _confirm(cluster, errors)
    # Where nothing ran by now, memory has come back long ago.
    ran = {role for role, facts in before.items() if any(container.is_running for container in facts.containers)}
    settled = after | _settle(cluster, {role: after[role] for role in after.keys() & ran}, stopping)
    if errors:
        asked = [f"{role}: was asked, nothing of ours is left there" for role in after if role not in errors]
        for error in errors.values():
            error.details = "\n".join(filter(None, [error.details, *asked]))
        raise Failures(list(errors.values()))
    if not ended:
        return "nothing of ours was running"
    freed = sum(facts.memory.available - before[role].memory.available for role, facts in settled.items())
    total = f"{freed / 2**30:+.1f} GiB available on both nodes together"
    return "; ".join([", ".join(ended), "nothing of ours is left", total, *_find_short(settled, stopping)])


def _find_short(facts: dict[Role, Facts], stopping: Stopping) -> Iterator[str]:
    """Tell of each node that has less memory than a start needs, and what to do about it."""
    for role, found in facts.items():
        available = found.memory.available / 2**30
        if available < stopping.needed_gib:
            yield (
                f"memory of the {role} is not back: {available:.1f} GiB available, a start needs "
                f"{stopping.needed_gib:g}: `ps aux --sort=-rss | head` there shows who has it; "
                "what nobody has, a reboot frees"
            )


def _end_noting(
    node: Node, container: ContainerFacts, stopping: Stopping, errors: dict[Role, SparkserveError]
) -> list[str]:
    """End one container and say how; a failure is kept, so that the other rank is still ended."""
    begun = time.monotonic()
    try:
        gather(node)  # tells in seconds that a node fell silent since; its Docker client would wait for minutes
        how = end_container(node, container, stopping)
    except SparkserveError as error:
        error.node = error.node or node.role
        errors.setdefault(node.role, error)
        return []
    return [f"{container.name} on {node.role} ({how}, {time.monotonic() - begun:.1f} s)"]


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
    with _forgiving(node, "already in progress"):
        node.docker.api.remove_container(container.id, force=True)
    return how


def _keep_log(node: Node, container: ContainerFacts, stopping: Stopping) -> None:
    """Keep the log where that is possible; a full disk must not leave a rank running."""
    try:
        save_log(node, container, stopping.runs_dir, stopping.secrets)
    except (OSError, SparkserveError) as error:
        stopping.tell(f"{container.name}: its log could not be kept: {error}")


def _signal(node: Node, container: ContainerFacts, signal: str) -> None:
    # It ended by itself since we looked: rank 1 often does when rank 0 goes.
    with _forgiving(node, "is not running"):
        node.docker.api.kill(container.id, signal)


@contextmanager
def _forgiving(node: Node, gone: str) -> Iterator[None]:
    """Ask Docker for something that may have happened meanwhile."""
    from sparkserve.docker_client import explained

    try:
        with explained(node.role):
            yield
    except SparkserveError as error:
        if gone not in error.details and "No such container" not in error.details:
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


def _settle(cluster: Cluster, facts: dict[Role, Facts], stopping: Stopping) -> dict[Role, Facts]:
    """Wait until the memory of both nodes stops coming back: the kernel frees 100 GB in seconds, and may begin late."""
    begun, still = time.monotonic(), 0
    while facts and still < _STILL_LOOKS and time.monotonic() < begun + _MEMORY_SECONDS:
        stopping.check()
        time.sleep(0.4)
        now = {role: found for role, found in cluster.try_both(gather)[0].items() if role in facts}
        grew = {role: now[role].memory.available - facts[role].memory.available for role in now}
        rests = all(grew[role] < _STILL * facts[role].memory.total for role in now)
        is_short = any(found.memory.available < stopping.needed_gib * 2**30 for found in now.values())
        still = still + 1 if rests and not (is_short and time.monotonic() < begun + _LATE_SECONDS) else 0
        facts = {**facts, **now}
        if not still:
            available = " / ".join(f"{found.memory.available / 2**30:.1f}" for found in facts.values())
            stopping.tell(f"memory comes back: {available} GiB available")
    return facts


@contextmanager
def all_or_nothing(cluster: Cluster, runs_dir: Path, secrets: Secrets) -> Iterator[None]:
    """End and remove both ranks where what is inside fails or is interrupted."""
    try:
        yield
    except BaseException as error:
        left = abandon(cluster, runs_dir, secrets)
        if isinstance(error, SparkserveError):
            error.details += "".join(f"\nnot cleaned up: {problem}" for problem in left)
        raise


def abandon(cluster: Cluster, runs_dir: Path, secrets: Secrets) -> list[SparkserveError]:
    """End and remove both ranks at once after a start that failed; gives what could not be cleaned up."""
    hasty = Stopping(runs_dir, seconds=_HASTY_SECONDS, secrets=secrets)

    def clear(node: Node) -> None:
        for container in gather(node).containers:
            end_container(node, container, hasty)

    errors = cluster.try_both(clear)[1]
    _confirm(cluster, errors)
    return list(errors.values())
