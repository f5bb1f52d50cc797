"""The engine loop: slots, prefill chunk by chunk, decode round by round, one step of both ranks each."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue

from .control import Control
from .counters import Counters
from .lane import Lane, LaneBrokenError
from .tokens import PrefixCache, block_names

PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class Piece:
    """A token of a reply: its channel is reasoning, content or tool."""

    channel: str
    text: str


@dataclass(frozen=True)
class Done:
    """The end of a job: a finish reason, or the error that ended it."""

    reason: str = ""
    error: str = ""


@dataclass
class Job:
    """One request inside the engine, and how far it got."""

    prompt: list[str]
    reply: list[Piece]
    reason: str
    drafts: int
    events: "SimpleQueue[list[Piece] | Done]" = field(default_factory=SimpleQueue)
    cancelled: bool = False
    cached: int = 0
    prefilled: int = 0
    generated: int = 0
    rounds: int = 0
    accepted: int = 0
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0
    blocks: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = block_names(self.prompt)


class Engine:
    """Runs jobs on `parallel` slots; further ones wait, and one prompt is prefilled at a time."""

    def __init__(self, lane: Lane, control: Control, parallel: int, window: int) -> None:
        self.counters = Counters()
        self.parallel = parallel
        self._lane = lane
        self._control = control
        self._cache = PrefixCache(window)
        self._window = window
        self._waiting: deque[Job] = deque()
        self._prefilling: Job | None = None
        self._decoding: list[Job] = []
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start the loop."""
        threading.Thread(target=self._loop, name="engine", daemon=True).start()

    def submit(self, job: Job) -> None:
        """Queue a job, or refuse it when the lane is broken."""
        if self._lane.broken:
            raise LaneBrokenError(self._lane.broken)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    @property
    def decoding(self) -> int:
        """Streams in decode."""
        return len(self._decoding)

    @property
    def prefilling(self) -> int:
        """Streams in prefill."""
        return int(self._prefilling is not None)

    def gauges(self) -> dict[str, float]:
        """What the metrics show as gauges."""
        with self._changed:
            running = [*self._decoding, *([self._prefilling] if self._prefilling else [])]
            held = sum(job.prefilled + job.generated for job in running) / self._window
            return {
                "requests_running": len(running),
                "requests_waiting": len(self._waiting),
                "kv_cache_usage_ratio": min(held + self._cache.share_used, 1.0),
            }

    def _loop(self) -> None:
        while True:
            with self._changed:
                while not self._admit():
                    self._changed.wait()
            try:
                self._round()
            except LaneBrokenError as problem:
                self._fail_all(str(problem))

    def _admit(self) -> bool:
        """Give a free slot to the next job; true if there is work."""
        free = self._prefilling is None and len(self._decoding) < self.parallel
        if free and self._waiting:
            job = self._prefilling = self._waiting.popleft()
            job.started = time.monotonic()
            job.cached = job.prefilled = self._cache.known_tokens(job.blocks, len(job.prompt))
            self.counters.add(prompt_tokens_total=job.cached, cached_tokens_total=job.cached)
        return self._prefilling is not None or bool(self._decoding)

    def _round(self) -> None:
        if self._control.now.stalled or self._lane.hung():
            time.sleep(0.02)
            if self._lane.broken:
                raise LaneBrokenError(self._lane.broken)
            return
        self._drop_cancelled()
        if self._prefilling:
            self._prefill(self._prefilling)
        if self._decoding:
            self._decode()

    def _drop_cancelled(self) -> None:
        with self._changed:
            if self._prefilling and self._prefilling.cancelled:
                self._prefilling = None
            self._decoding = [job for job in self._decoding if not job.cancelled]
            self._waiting = deque(job for job in self._waiting if not job.cancelled)

    def _prefill(self, job: Job) -> None:
        chunk = min(PREFILL_CHUNK, len(job.prompt) - job.prefilled)
        started = time.monotonic()
        self._lane.step()
        _sleep_until(started + chunk / self._control.now.prefill_tokens_per_second)
        job.prefilled += chunk
        self.counters.add(prompt_tokens_total=chunk)
        self.counters.add_seconds("prefill_seconds_total", time.monotonic() - started)
        if job.prefilled < len(job.prompt):
            return
        self._cache.remember(job.blocks)
        with self._changed:
            self._prefilling = None
            self._decoding.append(job)

    def _decode(self) -> None:
        """One round: every stream gets as many tokens as its drafts were right for, in one go."""
        started, longest = time.monotonic(), 1
        self._lane.step()
        shares = [(job, _round_size(job)) for job in self._decoding]
        longest = max(size for _, size in shares)
        _sleep_until(started + longest / self._control.now.decode_tokens_per_second)
        self.counters.add_seconds("decode_seconds_total", time.monotonic() - started)
        self.counters.add(rounds_total=1)
        for job, size in shares:
            self._hand_out(job, size)

    def _hand_out(self, job: Job, size: int) -> None:
        pieces = job.reply[job.generated : job.generated + size]
        job.generated += len(pieces)
        job.rounds += 1
        kept = max(len(pieces) - 1, 0)
        job.accepted += kept
        self.counters.add(generation_tokens_total=len(pieces), mtp_drafted_total=job.drafts, mtp_accepted_total=kept)
        if not job.first_token:
            job.first_token = time.monotonic()
            self.counters.observe("time_to_first_token_seconds", job.first_token - job.arrived)
        if job.generated >= len(job.reply):
            self._finish(job)
        job.events.put(pieces)
        if job.finished:
            job.events.put(Done(reason=job.reason))

    def _finish(self, job: Job) -> None:
        job.finished = time.monotonic()
        self.counters.add(requests_total=1)
        self.counters.observe("request_latency_seconds", job.finished - job.arrived)
        with self._changed:
            self._decoding.remove(job)

    def _fail_all(self, why: str) -> None:
        with self._changed:
            jobs = [*self._waiting, *self._decoding, *([self._prefilling] if self._prefilling else [])]
            self._waiting.clear()
            self._decoding, self._prefilling = [], None
        for job in jobs:
            job.events.put(Done(error=why))


def _round_size(job: Job) -> int:
    """1, 2 … drafts + 1 tokens in turn, so that a round is no fixed number of tokens."""
    return job.rounds % (job.drafts + 1) + 1


def _sleep_until(moment: float) -> None:
    time.sleep(max(moment - time.monotonic(), 0.0))
