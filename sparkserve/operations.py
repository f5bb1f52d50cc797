"""The stories of a pair that runs: looking, watching, stopping, and what is kept of earlier runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from sparkserve import around, blueprint, engine, engine_logs, lifecycle, link, lock, planning, records, status_look
from sparkserve.around import AroundFacts, Trend
from sparkserve.cluster import Cluster, Deployment, Role, connect, pair_lock
from sparkserve.endpoint import open_endpoint
from sparkserve.engine_logs import LogLine, LogQuery
from sparkserve.engine_stop import Stopping
from sparkserve.errors import SparkserveError
from sparkserve.lifecycle import Outcome, Session
from sparkserve.parameters import decide_parameters
from sparkserve.plan import Plan, apply
from sparkserve.records import Record
from sparkserve.status_look import Question, Status
from sparkserve.watch import Event, Journal, Rules, Watch

_TOKEN_SECONDS = 30.0


@dataclass(frozen=True)
class View:
    """A status with what surrounds it."""

    status: Status
    context: int | None
    around: dict[Role, AroundFacts] = field(default_factory=dict)
    trends: dict[Role, Trend] = field(default_factory=dict)


def following(session: Session) -> Session:
    """Give a session of the recipe that was started last, where the command line names none."""
    wanted = records.read_wanted(session.state)
    if session.loaded.sources["recipe"] == "flag" or wanted.recipe in ("", session.settings.recipe):
        return session
    return lifecycle.with_recipe(session, wanted.recipe)


class Eyes:
    """Looks at the pair any number of times over one connection, which is opened anew when it was lost."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._stack = ExitStack()
        self._cluster: Cluster | None = None

    def __enter__(self) -> Eyes:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; the next look opens another."""
        self._cluster = None
        self._stack.close()

    def look(self, *, ask_token: bool = True, patience: float = 6.0, compare: bool = True) -> View:
        """Judge the pair; a node that cannot be asked makes the state unknown. `compare` is with what is wanted."""
        if self._cluster is None:
            self._cluster = self._stack.enter_context(connect(self._session.settings, lenient=True))
        cluster, session = self._cluster, self._session
        endpoint = open_endpoint(session.settings, session.recipe)
        question = Question(cluster, session.recipe, endpoint, session.state / "movement.json")
        if compare:
            question = self._compared(question)
        status = status_look.look(replace(question, ask_token=ask_token, patience=patience))
        endpoint.close()
        if status.unseen:
            self.close()
        return View(status, decide_parameters(session.settings, session.recipe).context)
