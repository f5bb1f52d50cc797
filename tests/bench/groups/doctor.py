"""A check-up of two healthy nodes of the lab: its time, with and without the proof of the cable, and from where nothing
is installed; its logins, and what a stream beside it loses: of a pair of ours, and of one that was started by hand."""

from __future__ import annotations

import compileall
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from tests.bench.figures import Figure, connections
from tests.bench.stream import TOKENS_PER_SECOND, Served, percent_lost
from tests.lab.pair import HOME, SOURCE, Pair, paired
from tests.lab.theirs import MODEL, NAMES, URL, fetched_by_hand, theirs_up

RUNS = 5
INSTANT = {"load_seconds_first": 0, "load_seconds_later": 0, "decode_tokens_per_second": TOKENS_PER_SECOND}


def measure() -> Iterator[Figure]:
    """Bring the lab up and check it up."""
    # As an installer does: a node cannot write beside our source, and would compile it for every command.
    compileall.compile_dir(SOURCE / "sparkserve", quiet=1)
    with paired() as pair:
        pair.reset()
        before = len(pair.logins())
        _seconds(pair)
        logins = len(pair.logins()) - before
        yield Figure("doctor_seconds", statistics.median(_seconds(pair) for _ in range(RUNS)), "s", 3.0)
        proved = statistics.median(_seconds(pair, "--link") for _ in range(RUNS))
        yield Figure("doctor_link_seconds", proved, "s", 6.0)
        yield connections("doctor_connections", [logins])
        yield _from_nothing(pair)
        yield _lost_beside_ours(pair)
        yield from _lost_beside_theirs(pair)


def _from_nothing(pair: Pair) -> Figure:
    """Install the wheel and all that it needs into a venv of its own and check up with that, as `uvx` does at first."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    place = SOURCE / ".bench"  # which the nodes see
    place.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as folder:
        Path(folder).chmod(0o755)
        own = ["--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", folder]
        subprocess.run([*pip, "wheel", str(SOURCE), *own], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        begun = time.perf_counter()
        venv.create(f"{folder}/venv", with_pip=False)
        python, pinned = f"{folder}/venv/bin/python", str(SOURCE / ".ci/requirements.lock")
        subprocess.run([*pip, "--python", python, "install", "--constraint", pinned, str(wheel)], check=True)
        words = ["doctor", f"spark@{pair.worker.management_address}", "-r", f"{HOME}/recipes/lab"]
        pair.head.run(["sh", "-c", 'cd /tmp && exec "$@"', "sh", f"{folder}/venv/bin/sparkserve", *words])
        return Figure("doctor_from_nothing_seconds", time.perf_counter() - begun, "s", 60.0)


def _lost_beside_ours(pair: Pair) -> Figure:
    pair.script_engine(**INSTANT)
    if pair.ask("up")["exit_code"] != 0:
        raise RuntimeError("the pair does not start")
    lost = percent_lost(pair, partial(_examining, partial(_seconds, pair)))
    return Figure("tokens_lost_beside_doctor_percent", lost, "%", 2.0)


def _lost_beside_theirs(pair: Pair) -> Iterator[Figure]:
    """Check up beside a pair that was started by hand, as whoever has settings already, and as whoever has none."""

    def examine(*words: str) -> None:
        checks = pair.ask("doctor", *words)["data"]["checks"]
        named = [name for name in NAMES for check in checks if f"{name} runs rank" in check["observed"]]
        if named != [*NAMES]:
            raise RuntimeError(f"sparkserve doctor names {named} of {NAMES}")

    with fetched_by_hand(pair):
        pair.script_engine(**INSTANT)
        theirs_up(pair)
        # At first there are no settings; then those of our own recipe are written.
        for name, words in (("bare_", [f"spark@{pair.worker.management_address}"]), ("", [])):
            if not words:
                pair.write_settings()
            lost = percent_lost(pair, partial(_examining, partial(examine, *words)), Served(URL, MODEL))
            yield Figure(f"tokens_lost_beside_{name}doctor_by_hand_percent", lost, "%", 2.0)


@contextmanager
def _examining(examine: Callable[[], object]) -> Iterator[None]:
    """Do one check-up after the other; one that fails spoils the figure."""
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            examine()

    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(go_on)
        try:
            yield
        finally:
            ended.set()
    running.result()


def _seconds(pair: Pair, *words: str) -> float:
    begun = time.perf_counter()
    answer = pair.ask("doctor", *words)
    seconds = time.perf_counter() - begun
    checks = answer["data"]["checks"]
    # What a loaded machine's cable carries is not the matter of this group; that it was not measured is.
    lost = [check for check in checks if check["verdict"] in ("fail", "unseen")]
    wrong = [check for check in lost if (check["id"], check["verdict"]) != ("link_bandwidth", "fail")]
    if wrong or not checks:
        raise RuntimeError(f"sparkserve doctor: {wrong or 'no checks'}")
    return seconds
