"""Whether this rank goes on: the first reason to end wins, and every wait of the program ends with it."""

import signal
import threading
import time
from collections.abc import Callable

from .log import tag

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOPPED_WHILE_LOADING = 143


class EngineError(Exception):
    """A reason to end this rank: what to print and with which code to exit."""

    def __init__(self, line: str, code: int = 1) -> None:
        super().__init__(line)
        self.code = code


class StoppedError(Exception):
    """Somebody ended this rank while it was waiting."""


class Lifetime:
    """The end of this rank, seen from any thread."""

    def __init__(self) -> None:
        self.code = 0
        self.ready = False
        self._ended = threading.Event()
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:
        """True once there is a reason to end."""
        return self._ended.is_set()

    def end(self, code: int) -> None:
        """Ask the whole rank to end with this code."""
        with self._lock:
            if not self._ended.is_set():
                self.code = code
                self._ended.set()

    def pause(self, seconds: float) -> None:
        """Wait, or leave the caller with StoppedError when the rank ends."""
        if self._ended.wait(max(seconds, 0.0)):
            raise StoppedError

    def watch_signals(self, ignored: Callable[[], bool]) -> None:
        """Turn SIGTERM into an end.

        The signals stay blocked and a thread takes them: a handler could interrupt the main thread inside the very
        lock it needs. Blocked signals also reach a process that is number 1 of its container.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

        def wait_for_signals() -> None:
            while True:
                number = signal.sigwait(SIGNALS)
                if ignored():
                    tag(f"{signal.Signals(number).name} ignored, as scripted")
                    continue
                self.end(0 if self.ready else STOPPED_WHILE_LOADING)

        threading.Thread(target=wait_for_signals, name="signals", daemon=True).start()


class Deadline:
    """A point in time that several waits share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, never below 0."""
        return max(self._end - time.monotonic(), 0.0)
