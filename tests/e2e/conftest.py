"""One lab for all tests of this folder; each test begins with a healthy pair on which nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.refusal import look
from tests.lab.pair import HOME, Pair, paired

OTHER = f"{HOME}/recipes/other"
# What a start needs; in the rest of the cache the engine writes.
MADE = (
    *("home/spark/sparkserve/models", "home/spark/sparkserve/cache/derived", "home/spark/sparkserve/cache/templates"),
    *("home/spark/recipes/lab", "var/lib/sparkserve", "etc/sysctl.d"),
)
_made: dict[str, list[Any]] = {}


@pytest.fixture(scope="session")
def shared_pair() -> Iterator[Pair]:
    """Bring the lab up once; what is downloaded and built stays for the next test."""
    with paired() as pair:
        for node in pair.lab.nodes:  # engine images of an earlier state of this checkout are nothing to count
            old = node.docker("images", "-q", "--filter", "label=sparkserve.recipe").split()
            node.run(["docker", "rmi", "-f", *old], check=False)
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """A pair in order, with nothing running."""
    shared_pair.reset()
    return shared_pair


def prepare(pair: Pair) -> None:
    """Make all that a start needs, where a test before took something away or changed it."""
    if look(pair, MADE) == _made.get(pair.lab.identity):
        return
    answer = pair.ask("up", "--check")
    if [change for change in answer["data"]["changes"] if change["step"] != "start"]:
        done = pair.ask("up")
        assert done["exit_code"] == 0, done["errors"]
        assert pair.ask("stop")["exit_code"] == 0
    _made[pair.lab.identity] = look(pair, MADE)


@pytest.fixture
def prepared(pair: Pair) -> Pair:
    """A pair on which everything is there but the start."""
    prepare(pair)
    return pair


def begin(pair: Pair) -> Pair:
    """Start the pair, or find that it runs as wanted; what a test before took away is made first."""
    answer = pair.ask("start")
    if [error["code"] for error in answer["errors"]] == ["not_prepared"]:
        prepare(pair)
        answer = pair.ask("start")
    assert answer["exit_code"] == 0, answer["errors"]
    return pair


@pytest.fixture
def serving(pair: Pair) -> Pair:
    """A pair that serves since just now."""
    return begin(pair)


@pytest.fixture
def steady(shared_pair: Pair) -> Pair:
    """A pair that serves, since just now or since an earlier test: for those to which that makes no difference."""
    running = [node.docker("ps", "-a", "--format", "{{.Names}} {{.State}}") for node in shared_pair.lab.nodes]
    if running != ["sparkserve-rank0 running", "sparkserve-rank1 running"]:
        shared_pair.reset()
    shared_pair.tidy()
    return begin(shared_pair)


@pytest.fixture
def locked(pair: Pair) -> Pair:
    """A pair whose sources are resolved."""
    assert pair.ask("lock")["exit_code"] == 0
    return pair


@pytest.fixture
def unlocked(pair: Pair) -> Pair:
    """A pair whose sources still have to be resolved."""
    pair.head.run(["rm", "-f", "sparkserve.lock.json"])
    return pair


@pytest.fixture
def other(serving: Pair) -> Iterator[Pair]:
    """A serving pair, and beside it a recipe that serves under another name; its image goes again."""
    text = 'schema = 1\nextends = "lab"\nname = "other"\n[parameters]\nmodel_name = "Other"\n'
    serving.write(f"{OTHER}/recipe.toml", text)
    serving.head.run(["sh", "-c", "rm -f ~/sparkserve.other.lock.json"])
    yield serving
    for node in serving.lab.nodes:
        for image in node.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "sparkserve/other").split():
            node.docker("rmi", "-f", image)
