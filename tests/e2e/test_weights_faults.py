"""Weights on real nodes: a hub that misbehaves, disks that fill up, files that rot, a launcher that is killed."""

from __future__ import annotations

import json
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.machine import wait_until
from tests.lab.model_repo import MODEL_NAME
from tests.lab.node import LabNode
from tests.lab.pair import HOME, Pair

pytestmark = pytest.mark.faults
MODELS = f"{HOME}/sparkserve/models"
FLIP = """
import os, sys
path = sys.argv[1]
before = os.stat(path)
with open(path, "r+b") as file:
    file.seek(1000)
    byte = file.read(1)[0]
    file.seek(1000)
    file.write(bytes([byte ^ 1]))
os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
"""
# Waits for the first partial, then leaves 1 MiB free: at once, where writing the rest would race with the download.
# The kernel refuses less than what has come to be there since it was counted.
FILL = """
until find "$1" -path "*/.sparkserve-partial/*" -type f | grep -q .; do sleep 0.05; done
until mount -o "remount,size=$(($(df --output=used --block-size=1K "$1" | tail -1) + 1024))k" "$1"; do :; done
"""
CONTENT = {"host": "content"}
# What may have become of a file, whose path is the last word of each command.
HARMS = {
    "flip": ["python3", "-c", FLIP],
    "truncate": ["truncate", "--size=-1"],
    "link": ["sh", "-c", 'mv "$1" ~/aside && ln -s ~/aside "$1"', "sh"],
    "grow": ["sh", "-c", 'printf x >> "$1"', "sh"],
    "remove": ["rm"],
    "directory": ["sh", "-c", 'rm "$1" && mkdir "$1"', "sh"],
}


def folder(pair: Pair) -> str:
    lock = json.loads((pair.head.root / HOME[1:] / "sparkserve.lock.json").read_text())
    return f"{MODELS}/{lock['weights'][0]['repository']}/{lock['weights'][0]['commit']}"


def leave_partials(pair: Pair) -> list[Path]:
    """List what a download left that is not a whole file."""
    return [path for node in pair.lab.nodes for path in (node.root / MODELS[1:]).rglob(".sparkserve-partial/*")]


@pytest.fixture
def bare(pair: Pair) -> Pair:
    """A pair whose sources are known and whose weights are still to be fetched."""
    assert pair.ask("lock")["exit_code"] == 0
    for node in pair.lab.nodes:
        node.run(["rm", "-rf", MODELS])
    return pair


def problems(pair: Pair) -> list[str]:
    """Read every file of both nodes, whatever is remembered of it, and list what is wrong."""
    return [row["problem"] for row in pair.ask("weights", "verify", "--full")["data"]["findings"]]


def assert_proved(pair: Pair) -> dict[str, Any]:
    """`download` ends well, a second one finds nothing to do, every file is right, and nothing half is left."""
    answer = pair.ask("download")
    assert answer["exit_code"] == 0, answer["errors"]
    assert pair.ask("download", "--check")["data"]["changes"] == []
    assert problems(pair) == []
    assert leave_partials(pair) == []
    return answer


# -- the hub ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults",
    [
        # Two together, where one file could meet all of both and still not be given up.
        [
            ("cut", {"at_fraction": 0.5, "times": 4}),
            ("status", {"status": 429, "headers": {"Retry-After": "1"}, "times": 4}),
        ],
        [
            ("status", {"status": 416, "headers": {"Content-Range": "bytes */0"}, "match": CONTENT, "times": 2}),
            ("wrong_byte", {"offset": 500, "match": CONTENT, "times": 1}),
        ],
        [
            ("status", {"status": 503, "times": 4}),
            ("html", {"body": "<html>sign in</html>", "match": CONTENT, "times": 2}),
        ],
        [("cut", {"at_fraction": 0.9, "reset": True, "match": CONTENT, "times": 10})],
        [("expire", {"match": CONTENT, "times": 4})],
        [("ignore_range", {"match": CONTENT})],
        [("stall", {"at_fraction": 0.99, "match": CONTENT, "times": 2})],
    ],
    ids=lambda faults: "+".join(kind for kind, _ in faults),
)
def test_a_hub_that_fails_for_a_while(bare: Pair, faults: list[tuple[str, dict[str, Any]]]) -> None:
    for kind, options in faults:
        bare.hub.fault(kind, **options)
    answer = assert_proved(bare)
    moved = [item["key"] for item in answer["data"]["applied"] if item["key"].split("/")[1] in ("download", "sync")]
    assert len(moved) == 90
    assert all(fault.left in (0, None) for fault in bare.hub.state.faults._faults)
    assert {kind for kind, _ in faults} <= {kind for entry in bare.hub.log() for kind in entry["faults"]}


def test_a_hub_that_is_down_for_longer_than_it_says(bare: Pair) -> None:
    """For a minute; `tests/component/test_download.py` adds up how long a download waits for a hub in all."""
    bare.hub.fault("status", status=503, headers={"Retry-After": "1"})
    repair = threading.Timer(60, bare.hub.control, kwargs={"clear_faults": True})
    repair.start()
    begun = time.monotonic()
    try:
        assert_proved(bare)
    finally:
        repair.cancel()
    assert time.monotonic() - begun > 60


@pytest.mark.parametrize(
    ("kind", "options", "code", "key"),
    [
        ("wrong_byte", {"offset": 500, "match": {"host": "content"}}, "wrong_content", "HF_ENDPOINT"),
        ("html", {"body": "<html>sign in</html>", "match": {"host": "content"}}, "not_data", "HF_ENDPOINT"),
        ("short", {"at_fraction": 0.9, "match": {"host": "content"}}, "wrong_size", "HF_ENDPOINT"),
        ("status", {"status": 404, "match": {"path_regex": "resolve.*[^_]config.json"}}, "hub_file_missing", "lock"),
        ("access", {MODEL_NAME: "gated"}, "hub_gated", "accept its terms"),
    ],
)
def test_a_hub_that_stays_wrong(bare: Pair, kind: str, options: dict[str, Any], code: str, key: str) -> None:
    if kind == "access":
        bare.hub.control(access=options)
    else:
        bare.hub.fault(kind, **options)
    answer = bare.ask("download")
    assert (answer["exit_code"], [error["code"] for error in answer["errors"]]) == (1, [code])
    assert key in answer["errors"][0]["hint"]
    assert {problem.partition(",")[0] for problem in problems(bare)} == {"missing"}  # what has its name is right
    bare.hub.reset()
    assert_proved(bare)


# -- disks ------------------------------------------------------------------------------------------------------------


@contextmanager
def disk_of(node: LabNode, size: str) -> Iterator[None]:
    node.run(["mkdir", "-p", MODELS])
    node.run(["mount", "-t", "tmpfs", "-o", f"size={size},uid=1000", "none", MODELS], user="root")
    try:
        yield
    finally:
        node.run(["umount", "-l", MODELS], user="root")


@pytest.mark.parametrize("role", ["head", "worker"])
def test_a_disk_that_fills_up_on_the_way(bare: Pair, role: str) -> None:
    node: LabNode = getattr(bare, role)
    with disk_of(node, "2200m"):
        bare.write_settings(SPARKSERVE_RATE_LIMIT="8MB")
        argv = bare.command("download", "--json")
        process = bare.head.popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        node.run(["timeout", "60", "sh", "-c", FILL, "sh", MODELS], user="root", timeout=90)
        answer = json.loads(process.communicate(timeout=120)[0])
        (error,) = answer["errors"]
        assert (answer["exit_code"], error["code"], error["node"]) == (1, "disk_full", role)
        assert "what has arrived is kept" in error["hint"]
        node.run(["mount", "-o", "remount,size=2200m", MODELS], user="root")
        bare.write_settings()
        assert_proved(bare)


# -- files that rot ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["head", "worker"])
def test_files_that_are_not_what_they_were(prepared: Pair, role: str) -> None:
    """Each file is harmed in another way: each is named, and each becomes right again."""
    node: LabNode = getattr(prepared, role)
    shards = {harm: f"model-{number:05}-of-00039.safetensors" for number, harm in enumerate(HARMS, 3)}
    paths = {harm: f"{folder(prepared)}/{shard}" for harm, shard in shards.items()}
    for harm, argv in HARMS.items():
        node.run([*argv, paths[harm]])
    try:
        refused = prepared.ask("start")
        assert (refused["exit_code"], refused["errors"][0]["code"]) == (3, "not_prepared")
        assert [harm for harm, shard in shards.items() if shard not in refused["errors"][0]["details"]] == []
        answer = prepared.ask("download")
        (error,) = answer["errors"]  # the directory is not ours to remove: told by name
        assert (answer["exit_code"], shards["directory"] in error["message"]) == (1, True), error
        node.run(["rmdir", paths["directory"]])
        left = prepared.ask("download", "--check")["data"]["changes"]
        assert [change["resource"] for change in left] == [f"model/{shards['directory']}"]
        assert_proved(prepared)
        for path in paths.values():
            assert (node.root / path[1:]).is_file()
            assert not (node.root / path[1:]).is_symlink()
    finally:
        node.run(["sh", "-c", "rm -f ~/aside"])


# -- a launcher that is killed ----------------------------------------------------------------------------------------


def test_twenty_kills_at_random_moments_and_then_a_run_that_ends_proved(bare: Pair) -> None:
    seed = random.randrange(1000)
    print(f"seed {seed}")
    moments = random.Random(seed)
    bare.write_settings(SPARKSERVE_RATE_LIMIT="4MB")
    unfinished = 0
    for _ in range(20):
        argv = bare.command("download")
        process = bare.head.popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # After the first time something is there already: then it is killed at any moment from its beginning on.
        wait_until(lambda: bool(leave_partials(bare)), "a partial file", 60)
        time.sleep(moments.uniform(0.2, 2.5))
        process.kill()
        process.wait()
        unfinished += bool(leave_partials(bare))
        for node in [] if leave_partials(bare) else bare.lab.nodes:  # all is there: from the start again
            node.run(["rm", "-rf", MODELS])
    assert unfinished >= 15
    bare.write_settings()
    assert_proved(bare)
