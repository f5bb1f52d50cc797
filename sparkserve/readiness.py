"""Asking a loading engine whether it answers yet: HTTP, the served name, a real token, a first longer prompt.

Before that: whether rank 1 has opened the port that rank 0 needs, where a recipe names one.
"""

from __future__ import annotations

import random
import re
import threading
import time

from sparkserve.cluster import Deployment
from sparkserve.endpoint import Endpoint
from sparkserve.engine_facts import gather
from sparkserve.errors import SparkserveError
from sparkserve.parameters import decide_ports
from sparkserve.plan import Work
from sparkserve.prompts import random_words
from sparkserve.recipe import Recipe
from sparkserve.replies import EndpointError

# The first completions may compile kernels for minutes.
_COMPLETION_SECONDS = 600.0
_PATIENCE = 10
_RETRY_SECONDS = 0.1
_LISTEN_SECONDS = 0.4
_LISTENERS = ("/proc/net/tcp", "/proc/net/tcp6")
# An answer that no waiting will change: wrong key, wrong name, a request that the engine cannot read.
_FINAL = (400, 401, 403, 404, 422)


def wait_for_worker(deployment: Deployment, seconds: int, work: Work) -> None:
    """Wait until rank 1 listens where rank 0 needs it; who connects to try could be taken for rank 0: nobody does."""
    recipe, worker, begun = deployment.recipe, deployment.cluster.worker, time.monotonic()
    if not recipe.readiness.worker_port:
        return
    port = decide_ports(deployment.settings, recipe).named[recipe.readiness.worker_port]
    listens = re.compile(rf"^ *\d+: \w+:{port:04X} \w+:0000 0A ", re.MULTILINE)
    guard_bytes = int(recipe.memory.guard_gib * 2**30)
    while True:
        texts = worker.session.ask("facts", files=list(_LISTENERS))["files"].values()
        if any(listens.search(text or "") for text in texts):
            return
        rank = gather(worker).of_rank(1)
        if rank is None or not rank.is_alive:
            message = f"rank 1 ended before it opened port {port}: {rank.describe() if rank else 'it is gone'}"
            raise SparkserveError("rank_ended", message, "`sparkserve logs --run last` shows its log", "worker")
        if time.monotonic() - begun > seconds:
            message = f"rank 1 did not open port {port} within {seconds} s"
            raise SparkserveError("start_timeout", message, "`readiness.worker_port` of the recipe names it", "worker")
        worker.session.ask("guard", container=rank.id, floor=guard_bytes)
        work.note(f"waiting for rank 1 to open port {port}")
        work.check()
        time.sleep(_LISTEN_SECONDS)


class Prober:
    """Asks in a thread of its own, so that a hanging completion does not keep us from seeing a rank die."""

    def __init__(self, endpoint: Endpoint, recipe: Recipe) -> None:
        self.state = "HTTP closed"
        self.answered = False
        self.error: BaseException | None = None
        self.finished = threading.Event()
        self._endpoint = endpoint
        self._recipe = recipe
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="readiness", daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()

    def _run(self) -> None:
        try:
            self._wait_for_http()
            self._check_name()
            self._wait_for_token()
            self._warm_up()
            self.answered = not self._ended.is_set()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits for us
            self.error = error
        finally:
            self.finished.set()

    def _wait_for_http(self) -> None:
        """Wait until the port answers; while an engine loads, nobody listens or it says 503."""
        path = self._recipe.readiness.health
        while not self._ended.is_set():
            try:
                status = self._endpoint.health(path)
                self.state = f"{path} answers {status}"
                if status != 503:
                    return
            except EndpointError as error:
                self.state = "HTTP closed" if error.code == "endpoint_closed" else error.message
            self._ended.wait(_RETRY_SECONDS)

    def _check_name(self) -> None:
        if self._ended.is_set():
            return
        names = self._endpoint.models(timeout=30)
        if self._endpoint.model not in names:
            message = f"the engine serves {', '.join(names) or 'nothing'}, not {self._endpoint.model}"
            raise SparkserveError("model_name", message, "compare the recipe's argv with SPARKSERVE_MODEL_NAME", "head")

    def _wait_for_token(self) -> None:
        """Get one token; server errors are met with some patience, since an engine may open HTTP a little early."""
        failures = 0
        while not self._ended.is_set():
            self.state = "waiting for the first token"
            try:
                self._endpoint.one_token(_COMPLETION_SECONDS)
            except EndpointError as error:
                failures += 1
                if error.status in _FINAL or error.code == "endpoint_timeout" or failures >= _PATIENCE:
                    raise
                self.state = error.message
                self._ended.wait(1.0)
            else:
                return

    def _warm_up(self) -> None:
        tokens = self._recipe.readiness.warm_up_tokens
        if not tokens or self._ended.is_set():
            return
        self.state = f"warming up with {tokens:,} tokens"
        text = random_words(int(tokens * 0.75), random.Random())  # noqa: S311 - filler, no secret
        request = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        self._endpoint.complete(request, _COMPLETION_SECONDS)
