"""Long prefills in every slot under a watch, with no false alarm: `make bench ONLY=soak`, for a quarter of an hour."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

from tests.bench.figures import Figure
from tests.e2e.load import fill_every_slot
from tests.e2e.watching import watching
from tests.lab.pair import paired


def measure() -> Iterator[Figure]:
    """Load the pair, look at it in every way, and count what was told beside `running`."""
    seconds = float(os.environ.get("SOAK_SECONDS", "900"))
    with paired() as pair:
        pair.reset()
        if pair.ask("up")["exit_code"] != 0:
            raise RuntimeError("the pair does not start")
        pair.script_engine(prefill_tokens_per_second=2000)
        before = [node.docker("ps", "-q") for node in pair.lab.nodes]
        ended, served = threading.Event(), []
        load = threading.Thread(target=lambda: served.append(fill_every_slot(pair, ended)))
        wrong_looks = 0
        with watching(pair) as watch:
            load.start()
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                wrong_looks += sum(pair.ask(command)["exit_code"] != 0 for command in ("status", "doctor"))
                time.sleep(5)
            ended.set()
            load.join()
            alarms = [event for event in watch.events() if event["kind"] != "running"]
        restarted = before != [node.docker("ps", "-q") for node in pair.lab.nodes]
    yield Figure("soak_false_alarms", len(alarms) + wrong_looks + restarted, "alarms", 0, note=f"{seconds:.0f} s")
    yield Figure("soak_prefills_served", served[0], "prompts", 4, "more")
