"""What goes wrong with a pair, on two real nodes: the commands say what is, and leave both ranks or none."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import Any

import pytest

from tests.e2e.refusal import codes
from tests.e2e.test_bad_input import squatter
from tests.lab.machine import wait_until
from tests.lab.pair import Pair

pytestmark = pytest.mark.faults
RANKS = ("sparkserve-rank0", "sparkserve-rank1")


def names(pair: Pair) -> list[str]:
    return [name for node in pair.lab.nodes for name in node.docker("ps", "-a", "--format", "{{.Names}}").split()]


def timed(pair: Pair, *words: str) -> tuple[dict[str, Any], float]:
    begun = time.monotonic()
    answer = pair.ask(*words)
    return answer, time.monotonic() - begun


def state(pair: Pair) -> tuple[str, int, str]:
    answer = pair.ask("status")
    return answer["data"]["state"], answer["exit_code"], "; ".join(answer["data"]["reasons"])


def text_of(answer: dict[str, Any]) -> str:
    return " ".join(f"{error['message']} {error.get('details', '')}" for error in answer["errors"])


def wait_for_ranks(pair: Pair) -> None:
    deadline = time.monotonic() + 60
    while sorted(names(pair)) != sorted(RANKS):
        assert time.monotonic() < deadline, names(pair)
        time.sleep(0.1)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", ["before_rendezvous", "loading"])
def test_a_rank_that_dies_before_it_serves_takes_the_start_with_it(prepared: Pair, place: str, rank: int) -> None:
    lines = ["Traceback (most recent call last):", "  in load", "ValueError: the lab wants it"]
    prepared.script_engine(exit_at={"at": place, "rank": rank, "code": 7, "log": lines})
    answer, seconds = timed(prepared, "start")
    assert answer["exit_code"] == 1
    assert f"rank {rank} ended" in text_of(answer), answer["errors"]
    assert names(prepared) == []
    assert seconds < 50, "the recipe gives a start 60 s"
    logs = prepared.sparkserve("logs").stdout + prepared.sparkserve("status").stdout
    assert b"stopped" in logs


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("harm", ["kill", "rm", "process"])
def test_half_a_pair_is_degraded_and_start_replaces_both(steady: Pair, rank: int, harm: str) -> None:
    node, name = steady.lab.nodes[rank], RANKS[rank]
    before = [one.docker("ps", "-q") for one in steady.lab.nodes]
    if harm == "process":
        pid = node.docker("top", name, "-eo", "pid,args").splitlines()[-1].split()[0]
        node.run(["kill", "-9", pid], user="root")
    else:
        node.docker(*{"kill": ["kill"], "rm": ["rm", "-f"]}[harm], name)
    wait_until(lambda: name not in node.docker("ps", "--format", "{{.Names}}").split(), f"the end of {name}", 60)
    found, code, why = state(steady)
    # without rank 0 the engine's rank 1 ends too, sooner or later
    assert (found, code) in ([("degraded", 5)] if rank else [("degraded", 5), ("stopped", 5)]), why
    assert f"rank {rank}" in why or f"rank{rank}" in why or harm == "rm"
    assert steady.ask("start")["exit_code"] == 0
    assert state(steady)[0] == "running"
    assert not {*before} & {one.docker("ps", "-q") for one in steady.lab.nodes}


@pytest.mark.parametrize(
    ("script", "expected", "words"),
    [
        ({"completions": "fail"}, "degraded", "the engine failed"),
        ({"completions": "hang"}, "stalled", "no token came"),
        ({"stalled": True}, "stalled", "no token came"),
        ({"health": "fail"}, "degraded", "HTTP 503"),
        ({"wrong_model_name": "other"}, "degraded", "does not exist"),
    ],
)
def test_a_pair_that_does_not_answer(steady: Pair, script: dict[str, Any], expected: str, words: str) -> None:
    steady.script_engine(**script)
    found, code, why = state(steady)
    assert (found, code) == (expected, 5), why
    assert words in why


@pytest.mark.parametrize("script", [{"completions": "fail"}, {"wrong_model_name": "other"}])
def test_http_that_is_open_is_not_ready(prepared: Pair, script: dict[str, Any]) -> None:
    prepared.script_engine(**script)
    answer = prepared.ask("start")
    assert answer["exit_code"] == 1
    assert names(prepared) == []


def test_another_setting_replaces_the_pair_and_nothing_else_does(steady: Pair) -> None:
    runs = [node.docker("ps", "-q") for node in steady.lab.nodes]
    assert steady.sparkserve("start").stdout.strip() == b"No changes"
    assert [node.docker("ps", "-q") for node in steady.lab.nodes] == runs
    steady.write_settings(SPARKSERVE_CONTEXT="32768")
    assert "another spec" in state(steady)[2]
    assert steady.ask("start")["exit_code"] == 0
    assert "32768" in steady.head.docker("inspect", "--format", "{{.Args}}", RANKS[0])
    assert state(steady)[0] == "running"


def test_a_stranger_with_our_name_is_refused(prepared: Pair) -> None:
    prepared.head.docker("run", "-d", "--name", RANKS[0], prepared.lab.registry_reference, "sleep", "600")
    with squatter(prepared.worker, "0.0.0.0", 8888):
        answer = prepared.ask("start")
    assert (answer["exit_code"], codes(answer["errors"])) == (3, [("name_taken", "head"), ("check_port", "worker")])
    last = prepared.ask("history")["data"]["runs"][0]
    assert (last["command"], last["ending"], "port 8888" in last["error"]) == ("start", "failed", True)
    assert prepared.ask("stop")["exit_code"] == 0
    assert names(prepared) == [RANKS[0]]


def test_a_worker_without_an_answering_sshd(serving: Pair) -> None:
    serving.worker.pause_sshd()
    try:
        begun = time.monotonic()
        found, code, why = state(serving)
        assert (found, code) == ("unknown", 6), why
        assert time.monotonic() - begun < 30
        answer = serving.ask("stop")
    finally:
        serving.worker.resume_sshd()
    assert answer["exit_code"] == 6
    assert names(serving) == [RANKS[1]]
    assert serving.ask("stop")["exit_code"] == 0
    assert names(serving) == []


def test_a_worker_without_a_docker_engine(serving: Pair) -> None:
    serving.worker.stop_docker()
    try:
        found, code, why = state(serving)
        answer = serving.ask("stop")
    finally:
        serving.worker.start_docker()
    assert (found, code) == ("unknown", 6), why
    assert answer["exit_code"] == 6
    assert serving.ask("stop")["exit_code"] == 0
    assert names(serving) == []


@pytest.mark.parametrize(
    ("numbers", "code"),
    [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGINT], 130)],
    ids=["ctrl-c", "term", "ctrl-c twice"],
)
def test_an_interrupted_start_leaves_nothing(prepared: Pair, numbers: list[signal.Signals], code: int) -> None:
    prepared.script_engine(load_seconds_first=30, load_seconds_later=30)
    run = prepared.head.popen(prepared.command("start"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_ranks(prepared)
    for number in numbers:
        time.sleep(0.5)
        run.send_signal(number)
    run.communicate(timeout=60)
    assert run.returncode == code
    assert names(prepared) == []


def test_a_killed_start_is_understood_by_the_next(prepared: Pair) -> None:
    prepared.script_engine(hang_at={"at": "loading"})
    run = prepared.head.popen(prepared.command("start"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for_ranks(prepared)
    run.kill()
    run.communicate(timeout=60)
    before = [node.docker("ps", "-aq") for node in prepared.lab.nodes]
    found, code, why = state(prepared)
    assert (found, code) == ("starting", 5), why
    prepared.script_engine()
    assert prepared.ask("start")["exit_code"] == 0
    assert [node.docker("ps", "-aq") for node in prepared.lab.nodes] == before
    assert state(prepared)[0] == "running"
