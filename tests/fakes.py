"""Stand-ins for the seams of the core: strict, so that a test fails on whatever it did not foresee."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

from sparkserve.cluster import Cluster, Node, NodeSession, Role
from sparkserve.errors import SparkserveError
from sparkserve.hosts import Host, Process
from sparkserve.plan import Applied, Cancelled, Change, Reporter, Work
from sparkserve.settings import Settings


class Unscripted(BaseException):
    """Something was asked that the test does not know; no `except Exception` may swallow it."""


@dataclass(frozen=True)
class Answer:
    """What a scripted command does."""

    stdout: bytes = b""
    exit_code: int = 0
    stderr: bytes = b""


@dataclass
class Call:
    """A command that was run, and what it got on stdin."""

    argv: tuple[str, ...]
    stdin: bytes = b""


class _Recorded(io.BytesIO):
    """A standard input that keeps what was written when it is closed."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def close(self) -> None:
        if not self.closed:
            self._call.stdin = self.getvalue()
        super().close()


class FakeProcess:
    """A command that ended before it began."""

    def __init__(self, answer: Answer, call: Call) -> None:
        self._answer = answer
        self.stdin: IO[bytes] = _Recorded(call)
        self.stdout: IO[bytes] = io.BytesIO(answer.stdout)

    def wait(self, timeout: float | None = None) -> int:
        return self._answer.exit_code

    def error_text(self) -> str:
        return self._answer.stderr.decode()

    def close(self) -> None:
        self.stdin.close()


class FakeHost(Host):
    """A machine on which only the scripted commands exist; each is used up by its call unless it is there always."""

    def __init__(self, name: str = "head") -> None:
        super().__init__(name)
        self.calls: list[Call] = []
        self._script: list[tuple[tuple[str, ...], Answer]] = []
        self._always: dict[tuple[str, ...], Answer] = {}

    def script(
        self,
        argv: Sequence[str],
        stdout: bytes = b"",
        *,
        exit_code: int = 0,
        stderr: bytes = b"",
        always: bool = False,
    ) -> None:
        """Foresee one call of `argv` (several, in order, by several scripts), or any number of calls."""
        answer = Answer(stdout, exit_code, stderr)
        if always:
            self._always[tuple(argv)] = answer
        else:
            self._script.append((tuple(argv), answer))

    def open(self, argv: Sequence[str]) -> Process:
        call = Call(tuple(argv))
        self.calls.append(call)
        for index, (words, answer) in enumerate(self._script):
            if words == call.argv:
                del self._script[index]
                return FakeProcess(answer, call)
        if call.argv in self._always:
            return FakeProcess(self._always[call.argv], call)
        raise Unscripted(f"{self.name}: {list(argv)}")

    def close(self) -> None:
        """Fail when something foreseen was never asked for."""
        if self._script:
            raise Unscripted(f"{self.name}: never run: {[words for words, _ in self._script]}")


class FakeSession:
    """A node program that knows only the given requests: `do` to a result or to a function of the fields."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self._answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def ask(self, do: str, **fields: Any) -> Any:
        self.asked.append((do, fields))
        if do not in self._answers:
            raise Unscripted(f"the node program is asked for {do} {fields}")
        answer = self._answers[do]
        if isinstance(answer, SparkserveError):
            raise answer
        return answer(**fields) if callable(answer) else answer

    def close(self) -> None:
        """Nothing to end."""


def make_node(
    role: Role, settings: Settings | None = None, *, host: Host | None = None, session: FakeSession | None = None
) -> Node:
    """Build a node on fakes; what is not given raises when it is used."""
    node = Node(role, host or FakeHost(role), settings or Settings())
    node.__dict__["session"] = cast("NodeSession", session or FakeSession({}))
    return node


def make_cluster(
    settings: Settings | None = None, *, head: FakeSession | None = None, worker: FakeSession | None = None
) -> Cluster:
    """Build a pair on fakes."""
    return Cluster(make_node("head", settings, session=head), make_node("worker", settings, session=worker))


@dataclass
class RecordingReporter(Reporter):
    """Keeps what it is told, in order: `(event, key, ...)`."""

    events: list[tuple[Any, ...]] = field(default_factory=list)

    def started(self, change: Change) -> None:
        self.events.append(("started", change.key))

    def progress(self, change: Change, done: int, total: int) -> None:
        self.events.append(("progress", change.key, done, total))

    def note(self, change: Change, text: str) -> None:
        self.events.append(("note", change.key, text))

    def finished(self, applied: Applied) -> None:
        self.events.append(("finished", applied.change.key, applied.proof))

    def failed(self, change: Change, error: SparkserveError) -> None:
        self.events.append(("failed", change.key, str(error)))

    def keys(self, event: str) -> list[str]:
        """List the keys of one kind of event."""
        return [key for kind, key, *_ in self.events if kind == event]


@dataclass
class RecordingWork(Work):
    """The `Work` of an action that is called directly; `cancel_after` checks it raises `Cancelled`."""

    cancel_after: int | None = None
    steps: list[tuple[int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checks: int = 0
    on_check: Callable[[], None] = lambda: None

    def progress(self, done: int, total: int) -> None:
        self.steps.append((done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def check(self) -> None:
        self.checks += 1
        self.on_check()
        if self.cancel_after is not None and self.checks > self.cancel_after:
            raise Cancelled
