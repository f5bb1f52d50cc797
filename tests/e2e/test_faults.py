"""What can happen on the way to a serving pair: broken images, killed launchers, nodes that go away, busy engines."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.load import request, requests, users
from tests.lab.pair import HOME, Pair

pytestmark = pytest.mark.faults
RECIPE = f"{HOME}/recipes/lab"
RUNS = f"{HOME}/.local/state/sparkserve/runs"
RANKS = ["sparkserve-rank0", "sparkserve-rank1"]


def names(pair: Pair) -> list[str]:
    return [name for node in pair.lab.nodes for name in node.docker("ps", "-a", "--format", "{{.Names}}").split()]


def images(pair: Pair) -> list[str]:
    """The engine images of both nodes, by tag."""
    form = ("--filter", "label=sparkserve.recipe", "--format", "{{.Tag}}")
    return sorted(tag for node in pair.lab.nodes for tag in node.docker("images", *form).split())


def launch(pair: Pair, *words: str) -> subprocess.Popen[bytes]:
    return pair.head.popen(pair.command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def wait_for_line(process: subprocess.Popen[bytes], pattern: str) -> None:
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line.decode())
        if re.search(pattern, seen[-1]):
            return
    raise AssertionError(f"no {pattern!r} in {''.join(seen)}")


def assert_ends_proved(pair: Pair, recipes: int = 1) -> None:
    """The next `up` ends well and the one after it finds nothing to do."""
    answer = pair.ask("up")
    assert answer["exit_code"] == 0, answer["errors"]
    assert {proof["verdict"] for proof in answer["data"]["proofs"]} == {"ok"}
    assert pair.ask("up", "--check")["data"]["changes"] == []
    assert names(pair) == RANKS
    assert len(images(pair)) == 2 * recipes


@contextmanager
def dockerfile(pair: Pair, line: str) -> Iterator[None]:
    """Put a line before the entry point of the recipe's Dockerfile."""
    path = f"{RECIPE}/Dockerfile"
    text = pair.head.run(["cat", path]).stdout.decode()
    pair.write(path, text.replace("ENTRYPOINT", f"{line}\nENTRYPOINT"))
    try:
        yield
    finally:
        pair.write(path, text)


# -- the image --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("RUN rm /opt/engine/bin/tensorfold", "image_entrypoint", "No such file or directory"),
        (r"RUN printf '#!/bin/sh\necho boom; exit 7\n' > /opt/engine/bin/tensorfold", "image_entrypoint", "boom"),
        ("RUN echo it is broken; false", "build_failed", "it is broken"),
    ],
)
def test_a_broken_image_never_gets_its_name(prepared: Pair, line: str, code: str, words: str) -> None:
    before = images(prepared)
    with dockerfile(prepared, line):
        answer = prepared.ask("up")
    assert answer["exit_code"] == 1
    assert [(error["code"], error["node"]) for error in answer["errors"]] == [(code, "head")]
    assert words in answer["errors"][0]["details"]
    assert answer["errors"][0]["hint"]
    assert images(prepared) == before
    assert names(prepared) == []


@pytest.mark.parametrize(("role", "step"), [("head", "build"), ("worker", "ship")])
def test_an_image_that_is_missing_on_one_node(prepared: Pair, role: str, step: str) -> None:
    (tag,) = set(images(prepared))
    node = getattr(prepared, role)
    # Under another name its layers stay: a head that builds it anew ends with the same image, and soon.
    node.docker("tag", f"sparkserve/lab:{tag}", "kept:lab")
    node.docker("rmi", f"sparkserve/lab:{tag}")
    try:
        answer = prepared.ask("start")
        assert (answer["exit_code"], answer["errors"][0]["code"]) == (3, "not_prepared")
        assert f"{role}: {step}" in answer["errors"][0]["details"]
        assert names(prepared) == []
        assert prepared.ask("build")["exit_code"] == 0
    finally:
        node.docker("rmi", "kept:lab")
    assert_ends_proved(prepared)


# -- ranks that fail --------------------------------------------------------------------------------------------------


def test_the_earliest_error_is_told_with_cause_and_advice_and_both_logs_are_kept(prepared: Pair) -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory"
    prepared.script_engine(exit_at={"at": "loading", "rank": 1, "code": 1, "log": line})
    begun = time.monotonic()
    answer = prepared.ask("start")
    assert time.monotonic() - begun < 50, "the recipe gives a start 60 s"
    (error,) = answer["errors"]
    # Whichever is seen first: the line, which the recipe knows to be fatal, or the end of the rank that wrote it.
    assert error["code"] in ("engine_failed", "rank_ended")
    assert (answer["exit_code"], error["node"]) == (1, "worker")
    assert "first error, rank 1" in error["details"]
    assert "out of memory" in error["details"]
    assert "cause:" in error["details"]
    assert "last line of rank 0" in error["details"]
    assert names(prepared) == []
    newest = sorted((prepared.head.root / RUNS[1:]).iterdir())[-1]
    assert sorted(path.name for path in newest.glob("rank*.log")) == ["rank0.log", "rank1.log"]
    assert "out of memory" in (newest / "rank1.log").read_text()


def test_both_ranks_fail_at_once(prepared: Pair) -> None:
    prepared.script_engine(exit_at={"at": "loading", "code": 3, "log": "RuntimeError: neither wants to"})
    answer = prepared.ask("start")
    assert answer["exit_code"] == 1
    (error,) = answer["errors"]
    assert re.search(r"first error, rank \d at .*neither wants to", error["details"])
    for rank in (0, 1):
        assert f"last line of rank {rank}: " in error["details"], error
    assert names(prepared) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_just_after_it_was_ready(prepared: Pair, rank: int) -> None:
    prepared.script_engine(exit_at={"at": "after_ready", "rank": rank, "code": 9, "after_seconds": 0.2})
    answer = prepared.ask("up")
    assert answer["exit_code"] != 0
    if names(prepared):  # ready was proved before it died: the pair is left for a look, and status tells
        status = prepared.ask("status")
        # The other rank may have followed it by now: then both are ended, and nothing runs.
        assert status["data"]["state"] in ("degraded", "stopped")
        assert status["exit_code"] == 5
    prepared.script_engine()
    assert_ends_proved(prepared)


def test_a_start_that_hangs_ends_at_the_recipes_limit(prepared: Pair) -> None:
    path = f"{RECIPE}/recipe.toml"
    text = prepared.head.run(["cat", path]).stdout.decode()
    prepared.write(path, text.replace("later_seconds = 60", "later_seconds = 4"))
    prepared.script_engine(hang_at={"at": "loading", "rank": 1})
    try:
        answer = prepared.ask("start")
    finally:
        prepared.write(path, text)
    (error,) = answer["errors"]
    assert (answer["exit_code"], error["code"]) == (1, "start_timeout")
    assert "rank 1: " in error["message"]
    assert names(prepared) == []


def test_the_engines_tables_are_missing(prepared: Pair) -> None:
    lock = json.loads((prepared.head.root / HOME[1:] / "sparkserve.lock.json").read_text())
    engram = lock["weights"][1]
    folder = f"{HOME}/sparkserve/models/{engram['repository']}/{engram['commit']}"
    prepared.worker.run(["rm", f"{folder}/model-00047-of-00048.safetensors"])
    answer = prepared.ask("start")
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (3, "not_prepared")
    assert "worker: sync engram/model-00047-of-00048.safetensors: missing" in answer["errors"][0]["details"]
    assert names(prepared) == []
    assert_ends_proved(prepared)


# -- nodes that go away -----------------------------------------------------------------------------------------------


def test_a_worker_that_freezes_while_it_loads(prepared: Pair) -> None:
    prepared.script_engine(load_seconds_first=60, load_seconds_later=60)
    process = launch(prepared, "start", "--json")
    deadline = time.monotonic() + 60
    while names(prepared) != RANKS:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    prepared.worker.pause_sshd()
    try:
        output, _ = process.communicate(timeout=120)
    finally:
        prepared.worker.resume_sshd()
    answer = json.loads(output)
    assert answer["exit_code"] == 6
    assert answer["errors"][0]["node"] == "worker"
    assert [name for name in names(prepared) if name == RANKS[0]] == []
    assert prepared.ask("stop")["exit_code"] == 0
    assert names(prepared) == []


def test_a_docker_engine_that_ends_while_the_ranks_load(prepared: Pair) -> None:
    prepared.script_engine(load_seconds_first=60, load_seconds_later=60)
    process = launch(prepared, "start")
    wait_for_line(process, "head: start .*loading layers")
    prepared.worker.stop_docker()
    try:
        output = process.communicate(timeout=120)[0].decode()
    finally:
        prepared.worker.start_docker()
    # Rank 1 ends with its engine, and rank 0 after it or not yet: whatever is seen first, the first to end is named.
    assert process.returncode in (1, 6)
    assert re.search(r"worker: rank 1 (was lost|ended) |worker: the worker could not be", output), output
    assert "worker: there is no Docker engine" in output
    assert prepared.head.docker("ps", "-aq") == ""
    assert prepared.ask("stop")["exit_code"] == 0
    assert names(prepared) == []


def test_a_worker_that_freezes_in_the_middle_of_a_stop(serving: Pair) -> None:
    serving.script_engine(ignore_sigterm=True)
    process = launch(serving, "stop")
    wait_for_line(process, "^head: stop .*SIGTERM")
    serving.worker.pause_sshd()
    try:
        serving.script_engine()
        serving.head.docker("kill", "--signal", "TERM", RANKS[0])
        output = process.communicate(timeout=120)[0].decode()
    finally:
        serving.worker.resume_sshd()
    assert process.returncode == 6, output
    assert "head: was asked, nothing of ours is left there" in output
    assert names(serving) in ([], RANKS[1:])
    assert serving.ask("stop")["exit_code"] == 0
    assert names(serving) == []


def test_both_nodes_reboot(serving: Pair) -> None:
    for node in serving.lab.nodes:
        node.stop_docker()
    for node in serving.lab.nodes:
        node.start_docker()
    status = serving.ask("status")
    assert (status["data"]["state"], status["exit_code"]) == ("stopped", 5)
    assert serving.ask("start")["exit_code"] == 0
    assert serving.ask("status")["data"]["state"] == "running"


# -- busy engines -----------------------------------------------------------------------------------------------------


def test_long_prefills_in_every_slot_are_busy_and_nothing_queues_behind_them(steady: Pair) -> None:
    # A chunk of 2048 tokens takes two seconds, and a prompt longer than all that is done meanwhile.
    steady.script_engine(prefill_tokens_per_second=1000)
    with users(steady, 6, request("w " * 50_000, max_tokens=4)):
        before = requests(steady)
        found: list[dict[str, Any]] = [steady.ask("status") for _ in range(2)]
        assert steady.ask("start")["data"]["changes"] == []
        checks = steady.ask("doctor")["data"]["checks"]
        assert requests(steady) == before
        steady.script_engine(prefill_tokens_per_second=1000, stalled=True)
        steady.ask("status")  # which may still see the chunk that was under way
        stalled = steady.ask("status")
    assert {(answer["data"]["state"], answer["exit_code"]) for answer in found} == {("running", 0)}
    assert "busy" in found[0]["data"]["reasons"][0]
    assert [check for check in checks if check["verdict"] in ("fail", "unseen")] == []
    assert (stalled["data"]["state"], stalled["exit_code"]) == ("stalled", 5)
