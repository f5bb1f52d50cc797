"""The downloader of one file: segments over several connections, resumed after anything, whole only when proved."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparkserve.errors import SparkserveError, disk_error
from sparkserve.hub_file import Hub, Source
from sparkserve.inventory import Item
from sparkserve.partial import Partial
from sparkserve.plan import Work
from sparkserve.web import Exchange, Limits, Stopped, StopSign, Trouble

_POLL_SECONDS = 0.1
# So much makes an attempt count as progress, and the count of failures begin anew.
_PROGRESS_BYTES = 1 << 20


def download(hub: Hub, wanted: Item, path: Path, work: Work) -> None:
    """Fetch a file into its partial at `path` until size and hash are right; it is neither renamed nor made durable.

    A wrong hash throws everything away and fetches once more from the start: a stale partial can be the reason.
    """
    observed = ""
    for _ in range(2):
        try:
            observed = _attempt(hub, wanted, path, work)
        except OSError as error:
            # Every other failure is a `Trouble` by now: what is left came from the file system.
            message = f"cannot write {path} ({wanted.file.size} bytes in all): {error.strerror}"
            raise disk_error(error.errno, message, "head", "disk_failed") from error
        if observed == wanted.file.digest:
            return
        work.note("wrong content: fetching it once more from the start")
    algorithm = wanted.file.algorithm
    raise SparkserveError(
        "wrong_content",
        f"{wanted} came twice with {algorithm} {observed}; needed: {wanted.file.digest}",
        "a mirror, a proxy or this machine's memory changes bytes: try another HF_ENDPOINT",
    )


def _attempt(hub: Hub, wanted: Item, path: Path, work: Work) -> str:
    with Partial(path, wanted.file, hub.limits.segment_bytes) as partial:
        _Fetch(hub, wanted, partial).run(work)
        observed = partial.digest(_hashing(work))
    if observed != wanted.file.digest:
        partial.throw_away()
    return observed


def _hashing(work: Work) -> Callable[[int], None]:
    def tell(done: int) -> None:
        work.check()
        work.note(f"hashing, {done >> 20} MiB")

    return tell


@dataclass
class _Span:
    """Neighbouring segments that one connection asks for at once."""

    position: int
    end: int


class _RangesIgnored(Exception):
    """The server gives the whole file whatever part it is asked for."""


class _Fetch:
    """The download of the segments that are missing."""

    def __init__(self, hub: Hub, wanted: Item, partial: Partial) -> None:
        self._hub, self._limits = hub, hub.limits
        self._wanted, self._partial = wanted, partial
        self._stop = StopSign()
        self._source = Source(hub, wanted, self._stop)
        self._place = hub.turns.begin()
        self._lock = threading.Lock()
        self._spans = deque(_make_spans(partial, hub.limits))
        self._received = partial.done_bytes
        self._failures: list[BaseException] = []
        self._one_stream = False

    def run(self, work: Work) -> None:
        """Fetch everything; ends within about a second when `work` is cancelled."""
        self._run_threads(work, self._limits.connections)
        if self._one_stream:
            work.note("the server ignores ranges: one connection fetches the whole file")
            self._stop = StopSign()
            self._source = Source(self._hub, self._wanted, self._stop)
            self._spans = deque(_whole_span(self._partial))
            self._run_threads(work, 1)

    def _run_threads(self, work: Work, width: int) -> None:
        names = [f"{self._wanted.file.path} {number}" for number in range(min(width, len(self._spans)))]
        threads = [threading.Thread(target=self._pull, name=name, daemon=True) for name in names]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    thread.join(_POLL_SECONDS / len(threads))
                work.check()
                work.progress(min(self._received, self._partial.size), self._partial.size)
        finally:
            self._stop.raise_it()
            for thread in threads:
                # One that still looks up a name or connects ends by itself later, without touching anything.
                thread.join(1)
        if self._failures:
            raise self._failures[0]

    def _pull(self) -> None:
        """Fetch spans until none is left; the first failure ends all threads of the file."""
        try:
            buffer = memoryview(bytearray(self._hub.pace.chunk_bytes))
            while True:
                with self._lock:
                    if not self._spans:
                        return
                    span = self._spans.popleft()
                self._fetch(span, buffer)
        except Stopped:
            return
        except _RangesIgnored:
            self._one_stream = True
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits in `run`
            self._failures.append(error)
        finally:
            self._hub.connections.close()
        self._stop.raise_it()

    def _fetch(self, span: _Span, buffer: memoryview) -> None:
        """Fetch one span, with a new request from where it stands after each failure that may pass."""
        failures = 0
        while span.position < span.end:
            begun = span.position
            try:
                with self._hub.turns.take(self._place, self._stop):
                    exchange, start = self._source.open(span.position, span.end)
                    with exchange:
                        self._receive(exchange, start, span, buffer)
            except Trouble as trouble:
                progress = span.position - begun >= min(_PROGRESS_BYTES, self._limits.segment_bytes)
                failures = 1 if progress else failures + 1
                if failures >= (trouble.tries or self._limits.tries):
                    raise trouble.error from trouble
                # A server that asks for less than our own patience is not believed to be well by then.
                self._stop.sleep(max(trouble.wait or 0, self._backoff(failures)))

    def _backoff(self, failures: int) -> float:
        longest = min(self._limits.longest_wait, self._limits.first_wait * float(1 << (failures - 1)))
        return longest * random.uniform(0.75, 1.25)  # noqa: S311 - spreads retries, guards nothing

    def _receive(self, exchange: Exchange, position: int, span: _Span, buffer: memoryview) -> None:
        if position < span.position and not self._one_stream:
            raise _RangesIgnored
        while position < span.end:
            until = span.position if position < span.position else span.end
            count = exchange.read_into(buffer[: until - position])
            if not count:
                text = f"{self._wanted}: the answer ended after {position} of {span.end} bytes"
                raise Trouble(
                    SparkserveError("cut_short", text, "run the same command again: what has arrived is kept")
                )
            self._hub.pace.spend(count, self._stop)
            if position >= span.position:
                self._write(position, buffer[:count])
                span.position += count
            position += count

    def _write(self, position: int, data: memoryview) -> None:
        self._stop.check()
        self._partial.write(position, data)
        with self._lock:
            self._received += len(data)


def _make_spans(partial: Partial, limits: Limits) -> list[_Span]:
    """Group missing neighbours: long enough to spare requests, short enough that the hash at the front keeps up."""
    segment = limits.segment_bytes
    longest = min(limits.span_segments, max(1, partial.size // segment // (4 * limits.connections))) * segment
    spans: list[_Span] = []
    for number in partial.missing():
        start, end = number * segment, min(partial.size, (number + 1) * segment)
        if spans and spans[-1].end == start and end - spans[-1].position <= longest:
            spans[-1].end = end
        else:
            spans.append(_Span(start, end))
    return spans


def _whole_span(partial: Partial) -> list[_Span]:
    return [_Span(number * partial.segment_bytes, partial.size) for number in partial.missing()[:1]]
