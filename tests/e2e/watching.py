"""A watch that runs on the head, and what it said."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.lab.pair import HOME, Pair

EVENTS = f"{HOME}/.local/state/sparkserve/events.jsonl"


@dataclass
class Watching:
    """The events of a watch, from its own beginning on."""

    pair: Pair
    begun: float

    def events(self) -> list[dict[str, Any]]:
        text = self.pair.head.run(["cat", EVENTS], check=False).stdout.decode()
        found = [json.loads(line) for line in text.splitlines()]
        return [event for event in found if event["at"] >= self.begun]

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events()]

    def wait_for(self, kind: str, seconds: float = 60.0) -> dict[str, Any]:
        found = self._wait(lambda: [event for event in self.events() if event["kind"] == kind], seconds, kind)
        return found[0]

    def named(self, rank: int, moment: float, seconds: float = 60.0) -> dict[str, Any]:
        """Give the first event after a moment that says which rank broke."""

        def look() -> list[dict[str, Any]]:
            later = (event for event in self.events() if event["at"] > moment)
            return [event for event in later if re.search(f"rank ?{rank}\\b", event["text"])]

        return self._wait(look, seconds, f"word of rank {rank}")[0]

    def _wait(self, look: Callable[[], list[dict[str, Any]]], seconds: float, what: str) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        while not (found := look()):
            assert time.monotonic() < deadline, f"no {what} in {self.events()}"
            time.sleep(0.1)
        return found


@contextmanager
def watching(pair: Pair) -> Iterator[Watching]:
    """Run `sparkserve watch` while the block runs."""
    watch = Watching(pair, time.time())
    with pair.head.popen(pair.command("watch"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            yield watch
            assert process.poll() is None, process.communicate()
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            assert b"Traceback" not in errors, errors.decode()
