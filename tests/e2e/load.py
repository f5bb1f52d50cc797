"""Long prompts in every slot of the engine."""

from __future__ import annotations

import json
import threading

from tests.lab.pair import HOME, Pair

SLOTS = 4
WORDS = 12_000


def fill_every_slot(pair: Pair, ended: threading.Event) -> int:
    """Keep every slot busy with long prefills until `ended`; gives how many prompts were answered."""
    text = " ".join(f"word{number}" for number in range(WORDS))
    body = {"model": "DeepSeek-V4.1-Flash-1017", "prompt": text, "max_tokens": 1}
    answered = []

    def ask(slot: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            # Each prompt begins otherwise, so that none is in the engine's cache.
            path = f"{HOME}/prefill{slot}.json"
            pair.write(path, json.dumps({**body, "prompt": f"{slot} {turn} {text}"}))
            argv = ["curl", "-sf", "-m", "120", "http://127.0.0.1:8888/v1/completions"]
            done = pair.head.run([*argv, "-H", "Content-Type: application/json", "-d", f"@{path}"], timeout=150)
            answered.append(json.loads(done.stdout)["choices"])

    threads = [threading.Thread(target=ask, args=(slot,)) for slot in range(SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(answered)
