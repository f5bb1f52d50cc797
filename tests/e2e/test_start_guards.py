"""What a start refuses by itself: a node that runs out of memory while it loads, files that the engine may not read."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.node import LabNode
from tests.lab.pair import HOME, Pair

pytestmark = pytest.mark.faults
OTHER = f"{HOME}/recipes/other"
MODELS = f"{HOME}/sparkserve/models"
SHORT = 900_000  # KiB, below the guard's 1 GiB


@pytest.fixture
def loading(prepared: Pair) -> Iterator[subprocess.Popen[bytes]]:
    """A start whose ranks load for longer than the test takes."""
    prepared.script_engine(load_seconds_later=60, meminfo_gib=1)
    command = prepared.command("start", "--json")
    with prepared.head.popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as start:
        deadline = time.monotonic() + 20
        while not all("layers" in said(node) for node in prepared.lab.nodes):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)  # one look at both nodes: their guards watch from then on
        yield start


def said(node: LabNode) -> str:
    containers = node.docker("ps", "-q").split()
    return node.docker("logs", *containers) if containers else ""


def seconds_until_ended(node: LabNode) -> float:
    begun = time.monotonic()
    while node.docker("ps", "-q"):
        assert time.monotonic() < begun + 10
        time.sleep(0.02)
    return time.monotonic() - begun


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_falls_below_the_floor_while_loading(
    loading: subprocess.Popen[bytes], prepared: Pair, rank: int
) -> None:
    node = prepared.lab.nodes[rank]
    node.set_meminfo(MemAvailable=SHORT)
    assert seconds_until_ended(node) < 1.5
    answer = json.loads(loading.communicate(timeout=30)[0])
    (error,) = answer["errors"]
    assert (answer["exit_code"], error["code"], error["node"]) == (1, "memory_floor", ("head", "worker")[rank])
    assert f"rank {rank} was killed" in error["message"]
    # The rank went on to take memory until it was killed.
    assert re.search(r"0\.\d GiB of memory were left, needed: 1 GiB", error["message"])
    assert [node.docker("ps", "-aq") for node in prepared.lab.nodes] == ["", ""]


def test_the_workers_guard_acts_while_the_connection_hangs(loading: subprocess.Popen[bytes], prepared: Pair) -> None:
    prepared.worker.pause_sshd()
    try:
        prepared.worker.set_meminfo(MemAvailable=SHORT)
        assert seconds_until_ended(prepared.worker) < 1.5
    finally:
        prepared.worker.resume_sshd()
    (error,) = json.loads(loading.communicate(timeout=60)[0])["errors"]
    assert (error["code"], error["node"]) == ("memory_floor", "worker")


def start_as_nobody(pair: Pair, path: str) -> dict[str, Any]:
    """Start with a user who may not read one file of the worker's; the owner's own account still reads it well."""
    text = 'schema = 1\nextends = "lab"\nname = "lab"\n[container]\nuser = "65534"\n'
    pair.write(f"{OTHER}/recipe.toml", text)
    pair.script_engine(hang_at={"at": "before_rendezvous"})
    try:
        pair.worker.run(["chmod", "600", path])
        assert pair.ask("weights", "verify")["exit_code"] == 0
        return pair.ask("start", "--recipe", OTHER)
    finally:
        pair.worker.run(["chmod", "644", path])


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("tokenizer_config.json", ("model_unreadable",)),  # which the stand-in engine never opens
        ("config.json", ("model_unreadable", "rank_ended")),  # at which it may end before anybody asks
    ],
)
def test_a_file_that_the_containers_user_may_not_read(prepared: Pair, name: str, codes: tuple[str, ...]) -> None:
    path = prepared.worker.run(["find", MODELS, "-name", name]).stdout.decode().strip()
    (error,) = start_as_nobody(prepared, path)["errors"]
    assert (error["code"] in codes, error["node"]) == (True, "worker"), error
    assert path in error["message"] or name in error["details"]
    assert "Permission denied" in error["details"]
    assert "the container's user must be able to read it" in error["hint"]
    assert [node.docker("ps", "-aq") for node in prepared.lab.nodes] == ["", ""]
