"""An engine image of 1 GB on the two-node lab: planned, found unchanged, and shipped again after a small change."""

from __future__ import annotations

import compileall
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

from tests.bench.figures import Figure
from tests.lab.pair import HOME, SOURCE, Pair, paired

RUNS = 5
# Each run builds and ships two images of 1 GB.
CHANGES = 3
DOCKERFILE = f"{HOME}/recipes/lab/Dockerfile"
LARGE = "".join(f"RUN head -c 500000000 /dev/urandom > /large-{name}\n" for name in "ab")
SMALL = "RUN head -c 1000000 /dev/urandom > /small-{}\n"


def measure() -> Iterator[Figure]:
    """Bring the lab up and take every figure there."""
    # As an installer does: a node cannot write beside our source, and would compile it for every command.
    compileall.compile_dir(SOURCE / "sparkserve", quiet=1)
    with paired() as pair:
        pair.reset()
        recipe = pair.head.run(["cat", DOCKERFILE]).stdout.decode()
        try:
            _build(pair, recipe, 0)
            yield Figure("plan_offline_seconds", _median(lambda: _succeed(pair, "plan")), "s", 0.5)
            yield Figure("reship_unchanged_seconds", _median(lambda: _succeed(pair, "build")), "s", 1.0)
            yield from _changed(pair, recipe)
        finally:
            for node in pair.lab.nodes:
                images = node.docker("images", "-q", "--filter", "label=sparkserve.recipe=lab").split()
                node.run(["docker", "rmi", "-f", *images], check=False)


def _changed(pair: Pair, recipe: str) -> Iterator[Figure]:
    """Change 1 MB at the top of the image again and again, and bring it over by our way and by the usual one."""
    target = f"spark@{pair.worker.link_address}"
    moved, ours, theirs = [], [], []
    for number in range(1, CHANGES + 1):
        before = _received(pair)
        ours.append(_build(pair, recipe, number))
        moved.append(_received(pair) - before)
        tag = pair.head.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "sparkserve/lab").split()[0]
        pair.worker.docker("rmi", "-f", tag)
        script = f"docker save {tag} | ssh -o StrictHostKeyChecking=accept-new {target} docker load"
        theirs.append(_seconds(partial(pair.head.run, ["sh", "-c", script], timeout=300)))
    yield Figure("reship_changed_mb", max(moved) / 1e6, "MB", 20, note="1 MB of a 1 GB image is new")
    ratio = statistics.median(one / other for one, other in zip(ours, theirs, strict=True))
    note = f"{statistics.median(ours):.1f} s, theirs {statistics.median(theirs):.1f} s"
    yield Figure("reship_over_save_and_load", ratio, "times", 0.7, note=note)


def _build(pair: Pair, recipe: str, number: int) -> float:
    """Build and ship with another last layer; give the seconds of the way to the worker, its proof included."""
    pair.write(DOCKERFILE, recipe.replace("ENTRYPOINT", f"{LARGE}{SMALL.format(number)}ENTRYPOINT"))
    answer = pair.ask("build", timeout=600)
    shipped = [row for row in answer["data"]["applied"] if "/ship/" in row["key"]] if answer["exit_code"] == 0 else []
    if len(shipped) != 1:
        raise RuntimeError(f"sparkserve build: {answer}")
    return float(shipped[0]["seconds"])


def _received(pair: Pair) -> int:
    path = f"/sys/class/net/{pair.worker.link_interface}/statistics/rx_bytes"
    return int(pair.worker.run(["cat", path]).stdout)


def _succeed(pair: Pair, *words: str) -> None:
    done = pair.sparkserve(*words)
    if done.returncode != 0:
        raise RuntimeError(f"sparkserve {' '.join(words)}: {done.stderr.decode()}")


def _median(action: Callable[[], object]) -> float:
    return statistics.median(_seconds(action) for _ in range(RUNS))


def _seconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun
