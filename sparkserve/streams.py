"""Commands that run for minutes: their output line by line, two of them joined, and all of it cancellable."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkserve.hosts import CommandResult, Host, Process, running

# Both streams in the order in which they were written; the command itself arrives as the script's arguments.
_MERGED = ("sh", "-c", 'exec "$@" 2>&1', "sh")
_BLOCK = 1024 * 1024
_POLL_SECONDS = 0.2
_TAIL_LINES = 200


def follow(
    host: Host, argv: Sequence[str], check: Callable[[], None], on_line: Callable[[str], None] | None = None
) -> CommandResult:
    """Run `argv` to its end, giving each line of output as it comes; when `check` raises, the command is ended."""
    tail: deque[str] = deque(maxlen=_TAIL_LINES)

    def take(line: str) -> None:
        tail.append(line)
        if on_line is not None:
            on_line(line)

    with running(host, [*_MERGED, *argv]) as process:
        reader = _Worker(lambda: _read_lines(process, take))
        process.stdin.close()
        reader.wait(check)
        code = _wait(process, check)
    return CommandResult(tuple(argv), code, "\n".join(tail).encode(), b"")


@dataclass(frozen=True)
class Joined:
    """How two joined commands ended, and the bytes that went from one to the other.

    `cut` tells that the sink ended before the source had given all: then the source's own end says nothing.
    """

    source: CommandResult
    sink: CommandResult
    size: int
    cut: bool


def join(
    host: Host,
    source: Sequence[str],
    sink: Sequence[str],
    check: Callable[[], None],
    on_bytes: Callable[[int], None],
) -> Joined:
    """Run `source | sink` on one machine without a temporary file; when `check` raises, both ends are ended."""
    with running(host, source) as reader, running(host, sink) as writer:
        pump = _Pump(reader, writer)

        def tick() -> None:
            on_bytes(pump.size)
            if not pump.drained and _has_ended(writer):
                pump.cut = True
                reader.close()

        _Worker(pump.run).wait(check, tick)
        sink_code = _wait(writer, check)
        if pump.cut:
            reader.close()
        source_code = _wait(reader, check)
        return Joined(
            CommandResult(tuple(source), source_code, b"", reader.error_text().encode()),
            CommandResult(tuple(sink), sink_code, writer.stdout.read(), writer.error_text().encode()),
            pump.size,
            pump.cut,
        )


class _Pump:
    """Moves bytes from one process to another and counts them."""

    def __init__(self, reader: Process, writer: Process) -> None:
        self._reader = reader
        self._writer = writer
        self.size = 0
        self.drained = False
        self.cut = False

    def run(self) -> None:
        read = getattr(self._reader.stdout, "read1", self._reader.stdout.read)
        with contextlib.suppress(OSError, ValueError):  # one end is gone: the exit codes tell why
            while block := read(_BLOCK):
                self._write(block)
            self.drained = True
        with contextlib.suppress(OSError):
            self._writer.stdin.close()

    def _write(self, block: bytes) -> None:
        try:
            self._writer.stdin.write(block)
            self.size += len(block)
        except OSError:
            self.cut = True
            raise


class _Worker:
    """A thread that is waited for in short steps, so that an interrupt gets through."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._bug: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._thread.start()

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as bug:  # noqa: BLE001 - raised again in the thread that waits
            self._bug = bug

    def wait(self, check: Callable[[], None], tick: Callable[[], None] = lambda: None) -> None:
        while self._thread.is_alive():
            check()
            tick()
            self._thread.join(_POLL_SECONDS)
        if self._bug is not None:
            raise self._bug
        tick()


def _read_lines(process: Process, take: Callable[[str], None]) -> None:
    with contextlib.suppress(OSError, ValueError):  # closed under us: the waiting side knows why
        for raw in process.stdout:
            take(raw.decode(errors="replace").rstrip())


def _has_ended(process: Process) -> bool:
    try:
        process.wait(0)
    except TimeoutError:
        return False
    return True


def _wait(process: Process, check: Callable[[], None]) -> int:
    while True:
        check()
        with contextlib.suppress(TimeoutError):
            return process.wait(_POLL_SECONDS)
