"""The image on its way to the worker, on two real Docker engines: what crosses the cable, and what may go wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.test_faults import dockerfile, images
from tests.lab.node import LabNode
from tests.lab.pair import HOME, Pair

pytestmark = pytest.mark.faults
# A `docker` that takes every image away from the worker between the look and the first load, as a prune would.
PRUNING = """#!/bin/sh
if [ "$1" = save ]; then
  [ -e ~/shim/saves ] || ssh {worker} 'docker rmi -f $(docker images -q)' >&2
  echo "$@" >> ~/shim/saves
fi
exec /usr/bin/docker "$@"
"""


@pytest.fixture
def built(prepared: Pair) -> Iterator[Pair]:
    """A pair on which everything is there; images that a test makes go again."""
    before = set(images(prepared))
    yield prepared
    for node in prepared.lab.nodes:
        for tag in set(images(prepared)) - before:
            node.run(["docker", "rmi", "-f", f"sparkserve/lab:{tag}"], check=False)
        node.docker("image", "prune", "-f")
    assert prepared.ask("build")["exit_code"] == 0
    assert set(images(prepared)) == before


def received(worker: LabNode) -> int:
    path = f"/sys/class/net/{worker.link_interface}/statistics/rx_bytes"
    return int(worker.run(["cat", path]).stdout)


def steps(answer: dict[str, Any]) -> dict[str, str]:
    assert answer["exit_code"] == 0, answer["errors"]
    return {item["key"].split("/")[1]: item["proof"] for item in answer["data"]["applied"]}


def name_of(answer: dict[str, Any]) -> str:
    return str(answer["data"]["applied"][-1]["key"].split("/ship/")[1])


def assert_same(pair: Pair, name: str, path: str) -> None:
    """The image has the same layers on both nodes, and a container of the worker reads what the head's does."""
    layers = ["image", "inspect", "--format", "{{json .RootFS.Layers}} {{json .Config}}", name]
    read = ["run", "--rm", "--network", "none", "--entrypoint", "sha256sum", name, path]
    assert pair.worker.docker(*layers) == pair.head.docker(*layers)
    assert pair.worker.docker(*read) == pair.head.docker(*read)


def test_after_a_change_only_the_new_layer_crosses_the_cable(built: Pair) -> None:
    with dockerfile(built, "RUN head -c 1000000 /dev/urandom > /changed"):
        before = received(built.worker)
        answer = built.ask("build")
        moved = received(built.worker) - before
    assert re.search(r"\b1\.\d MB moved", steps(answer)["ship"])
    assert 1_000_000 < moved < 3_000_000
    assert_same(built, name_of(answer), "/changed")


def test_a_layer_that_goes_on_the_way_makes_the_whole_image_go(built: Pair) -> None:
    built.write(f"{HOME}/shim/docker", PRUNING.format(worker=built.worker.management_address), mode="755")
    path = f"{HOME}/shim:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    try:
        with dockerfile(built, "RUN head -c 1000000 /dev/urandom > /pruned"):
            answer = built.sparkserve("build", env={"PATH": path})
            assert answer.returncode == 0, answer.stderr
            saves = built.head.run(["cat", f"{HOME}/shim/saves"]).stdout.splitlines()
            assert len(saves) == 2, "what was missing, and then the whole image"
            assert steps(built.ask("build")) == {}
            (name,) = built.worker.docker("images", "--format", "{{.Repository}}:{{.Tag}}").split()
    finally:
        built.head.run(["rm", "-rf", f"{HOME}/shim"])
    assert_same(built, name, "/pruned")


def test_a_build_by_hand_makes_every_step_anew(built: Pair) -> None:
    with dockerfile(built, "RUN date +%s%N > /made"):
        first = built.ask("build")
        made = ["run", "--rm", "--entrypoint", "cat", name_of(first), "/made"]
        before = built.head.docker(*made)
        assert steps(built.ask("build")) == {}
        again = built.ask("build", "--no-cache", "--pull")
        assert set(steps(again)) == {"build", "ship"}
        assert name_of(again) == name_of(first)
        assert built.head.docker(*made) != before
        assert_same(built, name_of(again), "/made")
        assert steps(built.ask("build")) == {}
