"""Users of the engine: long prompts in every slot, or so many requests under way."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.lab.pair import HOME, Pair

SLOTS = 4
WORDS = 12_000
API = "http://127.0.0.1:8888"
ASK = ["curl", "-sf", "-m", "120", f"{API}/v1/completions", "-H", "Content-Type: application/json", "-d"]


def fill_every_slot(pair: Pair, ended: threading.Event) -> int:
    """Keep every slot busy with long prefills until `ended`; gives how many prompts were answered."""
    text = " ".join(f"word{number}" for number in range(WORDS))
    answered = []

    def ask(slot: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            # Each prompt begins otherwise, so that none is in the engine's cache.
            path = f"{HOME}/prefill{slot}.json"
            pair.write(path, request(f"{slot} {turn} {text}", max_tokens=1))
            done = pair.head.run([*ASK, f"@{path}"], timeout=150)
            answered.append(json.loads(done.stdout)["choices"])

    threads = [threading.Thread(target=ask, args=(slot,)) for slot in range(SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(answered)


def request(prompt: str, **keys: Any) -> str:
    return json.dumps({"model": "DeepSeek-V4.1-Flash-1017", "prompt": prompt, **keys})


@contextmanager
def users(pair: Pair, count: int, body: str) -> Iterator[None]:
    """Let so many users wait for their answer while the block runs; then they give up."""
    asking = [pair.head.popen([*ASK, body], stdout=subprocess.DEVNULL) for _ in range(count)]
    try:
        deadline = time.monotonic() + 60
        while sum(requests(pair)[kind] for kind in ("running", "waiting")) < count:
            assert time.monotonic() < deadline, requests(pair)
            time.sleep(0.2)
        yield
    finally:
        for user in asking:
            user.kill()
            user.wait()


def requests(pair: Pair) -> dict[str, float]:
    """Read the engine's own counters of requests: running, waiting, total."""
    text = pair.head.run(["curl", "-s", f"{API}/metrics"]).stdout.decode()
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tensorfold:requests_")]
    return {name.removeprefix("tensorfold:requests_"): float(value) for name, value in rows}
