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
READER = "sparkserve.reader"
SHORT = 900_000  # KiB, below the guard's 1 GiB
GUARD_SECONDS = 5.0  # it acts within one; a busy machine's docker takes the rest


@pytest.fixture
def loading(prepared: Pair) -> Iterator[subprocess.Popen[bytes]]:
    """A start whose ranks load for longer than the test takes."""
    prepared.script_engine(load_seconds_later=60, meminfo_gib=1)
    command = prepared.command("start", "--json")
    with prepared.head.popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as start:
        deadline = time.monotonic() + 60
        while not all("layers" in said(node) for node in prepared.lab.nodes):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)  # one look at both nodes: their guards watch from then on
        yield start


def said(node: LabNode) -> str:
    # Readers come and go before the ranks.
    containers = node.docker("ps", "-q", "--filter", "label=sparkserve.rank").split()
    return node.docker("logs", *containers) if containers else ""


def seconds_until_ended(node: LabNode) -> float:
    begun = time.monotonic()
    while node.docker("ps", "-q"):
        assert time.monotonic() < begun + 60
        time.sleep(0.02)
    return time.monotonic() - begun


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_falls_below_the_floor_while_loading(
    loading: subprocess.Popen[bytes], prepared: Pair, rank: int
) -> None:
    node = prepared.lab.nodes[rank]
    node.set_meminfo(MemAvailable=SHORT)
    assert seconds_until_ended(node) < GUARD_SECONDS
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
        assert seconds_until_ended(prepared.worker) < GUARD_SECONDS
    finally:
        prepared.worker.resume_sshd()
    (error,) = json.loads(loading.communicate(timeout=60)[0])["errors"]
    assert (error["code"], error["node"]) == ("memory_floor", "worker")


def start_as_nobody(pair: Pair, path: str) -> dict[str, Any]:
    """Start with a user who may not read one file of the worker's; the owner's own account still reads it well."""
    text = 'schema = 1\nextends = "lab"\nname = "lab"\n[container]\nuser = "65534"\n'
    pair.write(f"{OTHER}/recipe.toml", text)
    try:
        pair.worker.run(["chmod", "600", path])
        assert pair.ask("weights", "verify")["exit_code"] == 0
        return pair.ask("start", "--recipe", OTHER)
    finally:
        pair.worker.run(["chmod", "644", path])


def test_a_file_that_the_containers_user_may_not_read_keeps_the_pair_that_serves(serving: Pair) -> None:
    path = serving.worker.run(["find", MODELS, "-name", "tokenizer_config.json"]).stdout.decode().strip()
    before = [node.docker("ps", "-aq") for node in serving.lab.nodes]
    # What a launcher leaves that is killed between making a reader and starting it.
    image = serving.worker.docker("inspect", "--format", "{{.Config.Image}}", "sparkserve-rank1")
    serving.worker.docker("create", "--label", f"{READER}=sparkserve-rank1", image)
    (error,) = start_as_nobody(serving, path)["errors"]
    assert (error["code"], error["node"]) == ("check_source", "worker"), error
    assert f"rank 1 cannot read {path} from inside its container: Permission denied" in error["message"]
    assert f"`ls -l {path}`: the container's user must be able to read it" in error["hint"]
    assert [node.docker("ps", "-aq") for node in serving.lab.nodes] == before


def test_an_image_without_its_entry_point_keeps_the_pair_that_serves(serving: Pair) -> None:
    image = '[image]\nentrypoint = ["/opt/engine/bin/nosuch"]\nflags_help = []\n'
    serving.write(f"{OTHER}/recipe.toml", f'schema = 1\nextends = "lab"\nname = "lab"\n{image}')
    before = [node.docker("ps", "-aq") for node in serving.lab.nodes]
    answer = serving.ask("start", "--recipe", OTHER)
    assert {(error["code"], error["node"]) for error in answer["errors"]} == {
        ("check_source", "head"), ("check_source", "worker"),
    }  # fmt: skip
    assert "has no program /opt/engine/bin/nosuch in sparkserve/lab:" in answer["errors"][0]["message"]
    assert [node.docker("ps", "-aq") for node in serving.lab.nodes] == before


def test_a_start_that_is_killed_while_it_looks_inside_leaves_nothing_that_counts(prepared: Pair) -> None:
    pipe = f"{HOME}/nobody-writes"
    prepared.write(
        f"{OTHER}/recipe.toml",
        'schema = 1\nextends = "lab"\nname = "lab"\n[[container.mounts]]\n'
        f'source = "{pipe}"\ntarget = "/pipe"\nwritable = false\nmust_exist = true\nranks = [0]\n',
    )
    prepared.head.run(["mkfifo", pipe])
    try:
        command = prepared.command("start", "--recipe", OTHER)
        with prepared.head.popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as start:
            deadline = time.monotonic() + 20
            while not prepared.head.docker("ps", "-q", "--filter", f"label={READER}"):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            start.kill()
        assert prepared.ask("status")["data"]["reasons"] == ["no container of ours is on either node"]
        assert prepared.ask("stop")["exit_code"] == 0
    finally:
        prepared.head.run(["rm", "-f", pipe])
    assert [node.docker("ps", "-aq") for node in prepared.lab.nodes] == ["", ""]
