"""How much slower a served stream gets while something else goes on."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tests.lab.pair import HOME, Pair


@dataclass(frozen=True)
class Served:
    """An API on the head, and the model that it serves."""

    url: str
    model: str


OURS = Served("http://127.0.0.1:8888", "DeepSeek-V4.1-Flash-1017")
# Far below what the lab's engine could send: only a disturbance can make the stream slower.
TOKENS_PER_SECOND = 100


def percent_lost(
    pair: Pair, beside: Callable[[], AbstractContextManager[object]], served: Served = OURS, rounds: int = 3
) -> float:
    """Stream with and without `beside` going on, by turns; gives the percentage of tokens per second that is lost.

    It is the median of what each pair loses, so that a machine whose speed changes on the way counts for little.
    """
    lost = []
    for _ in range(rounds):
        alone = _stream_rate(pair, served)
        with beside():
            disturbed = _stream_rate(pair, served)
        lost.append(100 * (1 - disturbed / alone))
    return max(statistics.median(lost), 0.0)


def _stream_rate(pair: Pair, served: Served, tokens: int = 800) -> float:
    """Give the tokens per second of one streamed reply, from its first token to its last."""
    request = {"model": served.model, "prompt": "Count.", "max_tokens": tokens, "ignore_eos": True}
    pair.write(f"{HOME}/stream.json", json.dumps({**request, "stream": True, "temperature": 0}))
    argv = ["curl", "-sfN", "-m", "60", f"{served.url}/v1/completions", "-H", "Content-Type: application/json"]
    moments = []
    with pair.head.popen([*argv, "-d", f"@{HOME}/stream.json"], stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        for line in curl.stdout:
            if line.startswith(b"data: {"):
                moments.append(time.perf_counter())
    return (tokens - 1) / (moments[-1] - moments[0])
