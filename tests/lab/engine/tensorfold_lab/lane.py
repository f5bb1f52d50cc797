"""The lane: the two ranks in lockstep, and what is known about the other one."""

import threading
import time
from collections.abc import Callable

from .lifetime import Deadline, EngineError, Lifetime, StoppedError
from .log import tag
from .rendezvous import Links
from .wire import PeerLostError

STILL_WAITING_SECONDS = 10.0


class LaneBrokenError(Exception):
    """A step cannot be done any more: a rank is lost."""


class Lane:
    """This rank's view of the pair."""

    def __init__(self, rank: int, links: Links, lifetime: Lifetime, heartbeat_seconds: float) -> None:
        self.broken = ""
        self.hung: Callable[[], bool] = lambda: False
        self._rank = rank
        self._links = links
        self._lifetime = lifetime
        self._heartbeat_seconds = heartbeat_seconds
        self._last_beat = time.monotonic()
        self._losing = threading.Lock()

    @property
    def other(self) -> int:
        """The other rank's number."""
        return 1 - self._rank

    def watch(self) -> None:
        """Start sending and expecting heartbeats."""
        for work in (self._send_beats, self._expect_beats):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def wait_for_other(self, milestone: str, seconds: float) -> None:
        """Meet the other rank at a milestone of the start."""
        deadline, spoken = Deadline(seconds), Deadline(STILL_WAITING_SECONDS)

        def still_waiting() -> None:
            nonlocal spoken
            self._lifetime.pause(0)
            if spoken.left == 0:
                tag(f"rank {self._rank} finished {milestone}; waiting for rank {self.other}")
                spoken = Deadline(STILL_WAITING_SECONDS)
            if deadline.left == 0:
                raise EngineError(
                    f"torch.distributed.DistStoreError: {milestone}: timed out after {seconds:g} s, 1/2 clients joined"
                )

        try:
            self._links.steps.send({"finished": milestone})
            self._links.steps.receive(still_waiting)
        except PeerLostError as problem:
            self.lose(str(problem))
            self._lifetime.pause(0)

    def step(self) -> None:
        """Rank 0: have the other rank do its share of one step."""
        if self.broken:
            raise LaneBrokenError(self.broken)
        try:
            self._links.steps.send({"step": 1})
            self._links.steps.receive(self._check_whole)
        except PeerLostError as problem:
            self.lose(str(problem))
            raise LaneBrokenError(self.broken) from problem

    def follow(self) -> None:
        """Rank 1: do steps until the pair ends."""
        try:
            while True:
                message = self._links.steps.receive(lambda: self._lifetime.pause(0))
                while self.hung():
                    self._lifetime.pause(0.05)
                self._links.steps.send(message)
        except StoppedError:
            return
        except PeerLostError as problem:
            time.sleep(0.5)  # a goodbye on the other connection may be on its way
            self.lose(str(problem))

    def say_goodbye(self) -> None:
        """Rank 0 ends in order: tell the other rank, which ends too."""
        if self.broken:
            return
        try:
            self._links.beats.send({"goodbye": True})
        except PeerLostError as problem:
            tag(f"rank {self.other} was gone before the goodbye: {problem}")

    def lose(self, why: str) -> None:
        """Note once that the other rank is lost; before readiness, and on rank 1, that is the end of this rank too."""
        with self._losing:
            if self.broken or self._lifetime.ended:
                return
            self.broken = f"rank {self.other}: {why}"
        if not self._lifetime.ready:
            tag(f"RuntimeError: NCCL error 6: remote process exited or network error ({self.broken})")
            self._lifetime.end(1)
            return
        tag(f"the lane is broken ({self.broken}); every step fails from now on")
        if self._rank == 1:
            self._lifetime.end(1)

    def _check_whole(self) -> None:
        if self.broken:
            raise PeerLostError(self.broken)

    def _send_beats(self) -> None:
        try:
            while not self.broken:
                if not self.hung():
                    self._links.beats.send({"beat": 1})
                time.sleep(min(self._heartbeat_seconds / 4, 1.0))
        except PeerLostError as problem:
            self.lose(str(problem))

    def _expect_beats(self) -> None:
        try:
            while not self.broken:
                message = self._links.beats.receive(self._check_beat)
                self._last_beat = time.monotonic()
                if "goodbye" in message:
                    tag(f"rank {self._rank}: rank {self.other} has stopped; stopping too")
                    self._lifetime.end(0)
                    return
        except PeerLostError as problem:
            self.lose(str(problem))

    def _check_beat(self) -> None:
        if time.monotonic() - self._last_beat > self._heartbeat_seconds:
            raise PeerLostError(f"no heartbeat for {self._heartbeat_seconds:g} s")
