"""Real vLLM, tensor parallel over both nodes on their processors: from its build to a watch that repairs it."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.watching import Watching, watching
from tests.lab import vllm
from tests.lab.pair import Pair
from tests.unit.cases import wait_for

pytestmark = pytest.mark.vllm
RANKS = ("sparkserve-rank0", "sparkserve-rank1")
API = "http://127.0.0.1:8888"


def done(answer: dict[str, Any]) -> dict[str, Any]:
    assert answer["exit_code"] == 0, answer
    data: dict[str, Any] = answer["data"]
    return data


def report(what: str, seconds: float) -> None:
    """Print a figure; `make test-vllm` shows it."""
    print(f"figure vllm {what} {seconds:.1f} s")


@pytest.fixture(scope="module")
def pair(shared_pair: Pair) -> Pair:
    """A pair that has nothing, whose owner chose real vLLM."""
    shared_pair.reset()
    shared_pair.forget_everything()
    begun = time.monotonic()
    vllm.furnish(shared_pair)
    report("fetch wheels, make repositories", time.monotonic() - begun)
    return shared_pair


@pytest.fixture(scope="module")
def first(pair: Pair) -> Iterator[dict[str, Any]]:
    """The first `up`: everything is made, and the pair serves."""
    answer = pair.ask("up", timeout=900)
    for item in answer["data"]["applied"]:
        step = item["key"].split("/")[1]
        if step in ("build", "ship") or "ready" in item["key"]:
            report(step, item["seconds"])
    yield done(answer)
    pair.sparkserve("stop")


@pytest.fixture
def serving(pair: Pair, first: dict[str, Any]) -> Pair:
    """A pair that serves, whatever a test before did to it."""
    done(pair.ask("start"))
    return pair


def test_up_brings_real_vllm_to_serve(first: dict[str, Any]) -> None:
    steps = {item["key"].split("/")[1] for item in first["applied"]}
    assert steps >= {"download", "sync", "build", "ship", "start"}
    assert all(item["proof"] for item in first["applied"])


def test_the_protocol_holds_and_what_needs_training_is_not_asked(first: dict[str, Any]) -> None:
    proofs = {proof["name"]: (proof["verdict"], proof["observed"]) for proof in first["proofs"]}
    assert proofs["tool"][0] == proofs["schema"][0] == "ok", proofs
    assert proofs["answer"] == proofs["needle"] == ("not applicable", "random weights")
    assert set(proofs) == {"answer", "needle", "tool", "schema"}


def test_status_asks_an_idle_engine_for_a_token(serving: Pair) -> None:
    status = done(serving.ask("status"))
    assert status["state"] == "running"
    assert "a one-token completion was answered" in status["reasons"][0]
    assert (status["requests_running"], status["requests_waiting"]) == (0.0, 0.0)


def completion(tokens: int, seconds: int = 120) -> list[str]:
    """Give the argv of a request that takes so many steps; its client waits so long."""
    body = {"model": "tiny", "prompt": "go on", "max_tokens": tokens, "ignore_eos": True}
    url, header = f"{API}/v1/completions", "Content-Type: application/json"
    return ["curl", "-sfm", str(seconds), url, "-H", header, "-d", json.dumps(body)]


@contextmanager
def generating(pair: Pair) -> Iterator[None]:
    """Keep two requests in flight."""
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            pair.head.run(completion(600), timeout=150)

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        try:
            yield
        finally:
            ended.set()
    for one in asking:
        one.result()


def test_a_busy_engine_is_known_by_its_counters(serving: Pair) -> None:
    deadline = time.monotonic() + 60
    with generating(serving):
        while not (status := done(serving.ask("status")))["requests_running"]:
            assert time.monotonic() < deadline, status
    assert status["state"] == "running"
    assert "the counters move" in status["reasons"][0]
    assert status["tokens_per_second"] > 0


def test_both_ranks_are_one_engine_over_the_cable(serving: Pair) -> None:
    for rank, node in enumerate(serving.lab.nodes):
        env = node.docker("inspect", "--format", "{{.Config.Env}}", RANKS[rank])
        assert f"VLLM_HOST_IP={node.link_address}" in env
        assert f"GLOO_SOCKET_IFNAME={node.link_interface}" in env
        log = [line["text"] for line in serving.ask("logs", "--rank", str(rank))["data"]["lines"]]
        assert any(f"Worker_TP{rank}" in line for line in log)


@pytest.mark.parametrize(("harm", "words"), [("container", "rank 1 on the worker"), ("process", "HTTP 500|rank 1")])
def test_a_dead_rank_is_seen_at_once_though_health_is_good(serving: Pair, harm: str, words: str) -> None:
    before = [node.docker("ps", "-q") for node in serving.lab.nodes]
    if harm == "container":
        serving.worker.docker("kill", RANKS[1])
    else:
        kill_worker_process(serving)
    assert serving.head.run(["curl", "-fsS", "-o", "/dev/null", "-w", "%{http_code}", f"{API}/health"]).stdout == b"200"
    answer = serving.ask("status")
    assert (answer["data"]["state"], answer["exit_code"]) == ("degraded", 5), answer
    assert re.search(words, answer["data"]["reasons"][0])
    begun = time.monotonic()
    done(serving.ask("start"))
    report("repair, a stop and a start", time.monotonic() - begun)
    assert done(serving.ask("status"))["state"] == "running"
    assert not {*before} & {node.docker("ps", "-q") for node in serving.lab.nodes}


def kill_worker_process(pair: Pair, signal: str = "KILL") -> None:
    """Kill the process that holds the worker's half of the model, inside its living container."""
    rows = pair.worker.docker("top", RANKS[1], "-eo", "pid,args").splitlines()
    pids = [row.split()[0] for row in rows if "Worker" in row]
    assert pids, rows
    pair.worker.run(["kill", f"-{signal}", *pids], user="root")


def test_a_watch_leaves_a_busy_pair_alone_and_repairs_one_whose_process_died(serving: Pair) -> None:
    with watching(serving) as watch:
        watch.wait_for("running")
        with generating(serving):
            time.sleep(20)
        assert watch.kinds() == ["running"]
        prove_repair(watch, lambda: kill_worker_process(serving), "a killed process")


def test_a_watch_repairs_a_pair_whose_process_stands_still_with_requests_in_flight(serving: Pair) -> None:
    with watching(serving) as watch:
        watch.wait_for("running")
        # An engine that is to end waits for its clients: this one gives up soon.
        with serving.head.popen(completion(2000, seconds=25), stdout=subprocess.DEVNULL) as request:
            wait_for(lambda: bool(done(serving.ask("status"))["requests_running"]), "the request runs")
            named = prove_repair(watch, lambda: kill_worker_process(serving, "STOP"), "a stopped process")
            assert request.wait(60) != 0, "it was in flight"
    assert re.search(r"a signal stopped its process \d+ \(VLLM::Worker", named["text"])


def prove_repair(watch: Watching, harm: Callable[[], None], what: str) -> dict[str, Any]:
    """Do harm; prove that a watch names rank 1 and brings the pair back, worker first, once; give what named it."""
    nodes = watch.pair.lab.nodes
    before = {node.docker("ps", "-q") for node in nodes}
    begun = time.time()
    harm()
    named = watch.named(1, begun, 120)
    print(named["text"])
    report(f"{what}, until a watch names it", named["at"] - begun)
    restarted = watch.wait_for("restarted", 240)
    report(f"{what}, until an answer is proved again", restarted["at"] - begun)
    assert "answered" in restarted["text"]
    assert watch.kinds().count("restarting") == 1
    assert done(watch.pair.ask("status"))["state"] == "running"
    assert not before & {node.docker("ps", "-q") for node in nodes}
    head, worker = (
        node.docker("inspect", "--format", "{{.State.StartedAt}}", rank)
        for node, rank in zip(nodes, RANKS, strict=True)
    )
    assert worker < head, "the worker is started first"
    return named


def test_a_second_start_and_up_change_nothing(serving: Pair) -> None:
    assert serving.sparkserve("up").stdout.startswith(b"No changes")
    assert done(serving.ask("start"))["changes"] == []


def test_stop_leaves_nothing(serving: Pair) -> None:
    begun = time.monotonic()
    done(serving.ask("stop"))
    report("stop", time.monotonic() - begun)
    for node in serving.lab.nodes:
        assert node.docker("ps", "-aq") == ""
        assert node.run(["pgrep", "-f", "vllm serve"], user="root", check=False).stdout == b""
    assert serving.ask("status")["data"]["state"] == "stopped"
