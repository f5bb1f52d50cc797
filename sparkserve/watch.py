"""The supervisor's judgement: when a pair counts as broken, when it may be restarted, when to leave it down."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sparkserve.engine_watch import is_half_started
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_NOT_READY, SparkserveError, flatten
from sparkserve.plan import ApplyReport
from sparkserve.records import Wanted

if TYPE_CHECKING:
    from sparkserve.status_look import Status

Kind = Literal[
    "running", "starting", "unknown", "stopped", "degraded", "stalled", "restarting", "restarted", "restart_failed",
    "waiting", "gave_up", "call_failed",
]  # fmt: skip
BROKEN = ("stopped", "degraded", "stalled")
_RESTARTS = ("restarted", "restart_failed")
_LOOK_SECONDS = 1.0
# An idle engine is asked for a token so rarely that nobody notices.
_TOKEN_SECONDS = 30.0
# After a restart that could not begin, or that failed.
_REST_SECONDS = 10.0
_HOUR = 3600.0
_EVENTS_KEPT = 2000
_SECONDS = re.compile(r"\d+(\.\d+)? s\b")


@dataclass(frozen=True)
class Event:
    """Something that the watch saw or did, in seconds since 1970."""

    at: float
    kind: Kind
    text: str


class Journal:
    """The events of all watches, in one file of JSON lines; each can call a command of the owner's."""

    def __init__(self, path: Path, call: Sequence[str] = ()) -> None:
        self.path = path
        self._call = list(call)
        self._called: list[subprocess.Popen[bytes]] = []
        self._unwritten: list[Event] = []

    def add(self, kind: Kind, text: str) -> Event:
        """Keep an event and tell the owner's command, which gets it as one JSON object on its standard input."""
        event = Event(time.time(), kind, text)
        try:
            self._write(event)
        except OSError:  # a disk that takes nothing must not end the watch, which counts its restarts all the same
            self._unwritten.append(event)
        if self._call and kind != "call_failed":
            self._tell(event)
        return event

    def _write(self, event: Event) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.exists() else []
        if len(lines) > 2 * _EVENTS_KEPT:
            beside = self.path.with_suffix(f".{os.getpid()}")
            beside.write_text("".join(lines[-_EVENTS_KEPT:]), encoding="utf-8")
            beside.replace(self.path)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(event)) + "\n")

    def _tell(self, event: Event) -> None:
        try:
            called = subprocess.Popen(self._call, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError as error:
            self.add("call_failed", f"{self._call[0]}: {error.strerror}")
            return
        if called.stdin is None:
            raise AssertionError("Popen was asked for a pipe")
        with contextlib.suppress(
            BrokenPipeError
        ):  # it ended without reading: its exit code tells whether that was well
            called.stdin.write(json.dumps(asdict(event)).encode())
            called.stdin.close()
        self._called.append(called)

    def reap(self) -> Iterator[Event]:
        """Tell which of the owner's commands failed; one that runs on is left alone."""
        for called in [one for one in self._called if one.poll() is not None]:
            self._called.remove(called)
            if called.returncode:
                yield self.add("call_failed", f"{shlex.join(self._call)} ended with exit code {called.returncode}")

    def read(self) -> list[Event]:
        """Give all events, oldest first; what could not be written comes last."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
        except OSError:
            lines = []
        return [event for event in map(_read_event, lines) if event] + self._unwritten


def _read_event(line: str) -> Event | None:
    try:
        return Event(**json.loads(line))
    except (ValueError, TypeError):  # the half line of a watch that was killed while it wrote
        return None


@dataclass
class Watch:
    """Looks again and again; gives events only when something changed or was done.

    It is told how to look (with or without asking for a token), how to restart (or that it must not), what the owner's
    last word was, and whether another command is at work on the pair.
    """

    look: Callable[[bool], Status]
    restart: Callable[[], str] | None
    wanted: Callable[[], Wanted]
    busy: Callable[[], bool]
    journal: Journal
    restarts_per_hour: int = 3
    _told: str = ""
    _bad_looks: int = 0
    _token_at: float = float("-inf")
    _rest_until: float = 0.0
    _waits: str = ""

    def run(self) -> Iterator[Event]:
        """Watch until somebody ends it."""
        while True:
            begun = time.monotonic()
            yield from self.step()
            # A first bad look is followed at once by a second one: no restart without fresh evidence.
            pause = 0.0 if self._bad_looks == 1 else _LOOK_SECONDS
            time.sleep(max(0.0, begun + pause - time.monotonic()))

    def step(self) -> Iterator[Event]:
        """Look once, tell what changed, and do what follows."""
        yield from self.journal.reap()
        state, reasons = self._look()
        yield from self._tell_once(state, "; ".join(reasons))
        self._bad_looks = self._bad_looks + 1 if state in BROKEN else 0
        self._waits = "" if state == "running" else self._waits
        if self._bad_looks < 2 or time.monotonic() < self._rest_until:
            return
        wanted = self.wanted()
        if wanted.serving and not self.busy():
            yield from self._repair(wanted, "; ".join(reasons))

    def _look(self) -> tuple[Kind, tuple[str, ...]]:
        now = time.monotonic()
        ask_token = self._bad_looks > 0 or now - self._token_at >= _TOKEN_SECONDS
        if ask_token:
            self._token_at = now
        try:
            status = self.look(ask_token)
        except (SparkserveError, OSError) as error:
            return "unknown", (str(error),)
        return status.verdict.state, status.verdict.reasons

    def _tell_once(self, kind: Kind, text: str) -> Iterator[Event]:
        """Tell a state when it begins; the reasons of a good one change all the time and say nothing new."""
        mark = f"{kind} {_SECONDS.sub('', text)}" if kind in BROKEN else kind
        if mark != self._told:
            self._told = mark
            yield self.journal.add(kind, text)

    def _repair(self, wanted: Wanted, why: str) -> Iterator[Event]:
        events = [event for event in self.journal.read() if event.at > wanted.since]
        if any(event.kind == "gave_up" for event in events):
            return
        done = [event for event in events if event.kind in _RESTARTS and event.at > time.time() - _HOUR]
        if len(done) >= self.restarts_per_hour:
            text = f"{len(done)} restarts within an hour did not help: {why}; it stays down until `sparkserve start`"
            yield self.journal.add("gave_up", text)
            return
        if self.restart is None:
            if not self._waits:
                self._waits = "both ranks would be restarted now; a dry run does not"
                yield self.journal.add("waiting", self._waits)
            return
        if not self._waits:
            yield self.journal.add("restarting", why)
        self._rest_until = time.monotonic() + _REST_SECONDS
        try:
            proof = self.restart()
        except (SparkserveError, OSError) as error:
            yield from self._tell_failure(error)
            return
        self._bad_looks, self._told, self._waits = 0, "", ""
        yield self.journal.add("restarted", proof)

    def _tell_failure(self, error: SparkserveError | OSError) -> Iterator[Event]:
        """Tell of a restart that failed, and count it; one that began nothing waits: for a link, an engine, a disk."""
        words = _words(error) if isinstance(error, SparkserveError) else str(error)
        report = getattr(error, "report", None)
        has_begun = isinstance(report, ApplyReport) and is_half_started(report)
        could_not_begin = getattr(error, "exit_code", EXIT_NOT_READY) in (EXIT_NOT_READY, EXIT_COULD_NOT_LOOK)
        if has_begun or not could_not_begin:
            self._waits = ""
            yield self.journal.add("restart_failed", words)
        elif self._waits != words:
            self._waits = words
            yield self.journal.add("waiting", words)


def _words(error: SparkserveError) -> str:
    told = (": ".join(filter(None, (str(one), *one.details.splitlines()[:2]))) for one in flatten(error))
    return "; ".join(dict.fromkeys(told))
