"""One completion from request to access log: refused, hanging, failing or answered, as the script says."""

import hashlib
import itertools
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .arguments import Settings
from .chat_request import Ask, RequestError, read_ask
from .composing import Composer
from .control import Control
from .engine import Done, Engine, Job, Piece
from .lane import LaneBrokenError
from .log import tag
from .reply_bodies import Bodies

POLL_SECONDS = 0.1


class ClientGoneError(Exception):
    """The client has closed its connection."""


@dataclass
class Completions:
    """Answers completion requests through the engine."""

    settings: Settings
    engine: Engine
    composer: Composer
    control: Control
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def names(self) -> list[str]:
        """The model names served."""
        return [self.control.now.wrong_model_name or self.settings.name, *self.settings.aliases]

    def begin(self, body: dict[str, Any], *, chat: bool, client_gone: Callable[[], bool]) -> "Running":
        """Check a request and hand it to the engine."""
        ask = read_ask(body, self.settings, chat=chat)
        if ask.model not in self.names:
            raise RequestError(f"The model `{ask.model}` does not exist.", 404, "model_not_found")
        while self.control.now.completions == "hang":
            time.sleep(POLL_SECONDS)
            if client_gone():
                raise ClientGoneError
        if self.control.now.completions == "fail":
            raise RequestError("the engine failed, as scripted", 500, "internal_error")
        job = self.composer.compose(ask, self.control.now)
        try:
            self.engine.submit(job)
        except LaneBrokenError as problem:
            raise lane_error(str(problem)) from problem
        return Running(ask, job, next(self._numbers), client_gone)


@dataclass
class Running:
    """A request inside the engine."""

    ask: Ask
    job: Job
    number: int
    client_gone: Callable[[], bool]
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.ask, self.job, self.number)

    def whole(self) -> dict[str, Any]:
        """Wait for the end and give the body."""
        pieces = [piece for burst in self._bursts() for piece in burst]
        return self.bodies.whole(pieces)

    def stream(self) -> Iterator[dict[str, Any]]:
        """Give the chunks as they come."""
        try:
            if self.ask.chat:
                yield self.bodies.opening()
            for burst in self._bursts():
                yield from self.bodies.chunks(burst)
            yield from self.bodies.closing()
        finally:
            self.job.cancelled = not self.job.finished

    def _bursts(self) -> Iterator[list[Piece]]:
        while True:
            try:
                event = self.job.events.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if self.client_gone():
                    self.job.cancelled = True
                    tag(f"cancelled {self.bodies.request}: the client is gone")
                    raise ClientGoneError from None
                continue
            if isinstance(event, list):
                yield event
                continue
            self._end(event)
            return

    def _end(self, done: Done) -> None:
        if done.error:
            raise lane_error(done.error)
        job = self.job
        text = "".join(piece.text for piece in job.reply)
        prefill = job.first_token - job.started
        decode = max(job.finished - job.first_token, 1e-6)
        tag(
            f"done {self.bodies.request} prompt={len(job.prompt)} cached={job.cached} "
            f"thinking={'on' if self.ask.thinking else 'off'} tokens={job.generated} "
            f"sha={hashlib.sha256(text.encode()).hexdigest()[:12]} finish={job.reason} "
            f"tok/s={job.generated / decode:.1f} ttft={job.first_token - job.arrived:.3f} prefill={prefill:.3f} "
            f"rounds={job.rounds} accepted={job.accepted}/{job.rounds * job.drafts}"
        )


def lane_error(why: str) -> RequestError:
    """The failure of a request whose lane has lost a rank, also said in the log."""
    text = f"this lane lost a rank ({why}); restart it on every rank"
    tag(text)
    return RequestError(text, 500, "internal_error")
