from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from sparkserve.cluster import Cluster
from sparkserve.endpoint import Endpoint
from sparkserve.errors import DOCKER_PROBLEMS, EXIT_COULD_NOT_LOOK, SparkserveError
from sparkserve.operate_tables import status_data, status_view
from sparkserve.operations import View
from sparkserve.recipe_source import load_recipe
from sparkserve.records import Record, save_record
from sparkserve.status_look import Question, Status, look
from tests.component.docker_node import DockerNode, ours
from tests.fakes import FakeSession, make_cluster
from tests.lab_tests.stand_in_pair import Pair, serving, wait_until

WORDS = " ".join(f"word{number}" for number in range(20_000))


def make_pair(head: DockerNode, worker: DockerNode) -> Cluster:
    return make_cluster(head=head.session, worker=worker.session)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with serving(tmp_path / "pair") as found:
        yield found


@pytest.fixture
def question(pair: Pair, tmp_path: Path) -> Iterator[Question]:
    endpoint = Endpoint(f"http://127.0.0.1:{pair.port}", "flash")
    recipe = load_recipe("tensorfold-1017")
    counters = recipe.counters
    assert counters is not None
    recipe = recipe.model_copy(update={"counters": counters.model_copy(update={"stalled_seconds": 2})})
    cluster = make_pair(DockerNode(ours(0)), DockerNode(ours(1)))
    yield Question(cluster, recipe, endpoint, tmp_path / "state", patience=1.0)
    endpoint.close()


def in_background(pair: Pair, text: str, **keys: object) -> Callable[[], None]:
    thread = threading.Thread(target=lambda: pair.chat(text, **keys), daemon=True)
    thread.start()
    wait_until(lambda: pair.metrics()["tensorfold:requests_running"] > 0)
    return lambda: thread.join(60)


def told(status: Status) -> str:
    return "; ".join(status.verdict.reasons)


def test_idle(question: Question, pair: Pair) -> None:
    before = pair.metrics()["tensorfold:generation_tokens_total"]
    begun = time.monotonic()
    status = look(replace(question, patience=60))
    assert status.verdict.state == "running", told(status)
    assert time.monotonic() - begun < 30, "there is nothing to wait for"
    assert pair.metrics()["tensorfold:generation_tokens_total"] - before == 1
    data = status_data(View(status, 4096))
    assert (data["context"], data["requests_running"], data["tokens_per_second"]) == (4096, 0, None)
    assert data["nodes"]["worker"]["memory_available_bytes"] == 121_000_000 * 1024
    assert 0 <= data["uptime_seconds"] < 60


def test_a_degraded_pair_is_told_with_what_makes_it_right(question: Question) -> None:
    status = look(replace(question, wanted={"head": "sha256:newer", "worker": "sha256:newer"}))
    assert status.verdict.state == "degraded"
    assert "not tensorfold-1017" in told(status)
    assert status_view(View(status, 4096))[-1] == "hint: sparkserve start"


def test_busy_is_proved_by_counters_and_not_disturbed(question: Question, pair: Pair) -> None:
    pair.script(decode_tokens_per_second=100)
    finish = in_background(pair, "hello", max_tokens=400, ignore_eos=True)
    status = look(question)
    assert status.verdict.state == "running", told(status)
    assert "busy (1 running, 0 waiting); the counters move" in told(status)
    assert 50 < (status.evidence.tokens_per_second or 0) < 200
    pair.script(decode_tokens_per_second=100_000)
    finish()
    assert pair.metrics()["tensorfold:requests_total"] == 1, "a busy engine was sent a request of ours"


def test_a_long_prefill_is_busy(question: Question, pair: Pair) -> None:
    pair.script(prefill_tokens_per_second=8000)
    finish = in_background(pair, WORDS, max_tokens=1)
    status = look(question)
    assert (status.verdict.state, status.verdict.exit_code) == ("running", 0), told(status)
    assert "counters move" in told(status)
    pair.script(prefill_tokens_per_second=10_000_000)
    finish()


def test_stalled_is_known_after_the_limit_over_several_looks(question: Question, pair: Pair) -> None:
    pair.script(stalled=True)
    finish = in_background(pair, "hello", max_tokens=3)
    first = look(question)
    assert first.verdict.state == "running"
    assert re.search(r"no counter moved for \d s; it counts as stalled from 2 s on", told(first))
    second = look(question)
    assert (second.verdict.state, second.verdict.exit_code) == ("stalled", 5), told(second)
    pair.script()
    finish()
    assert look(question).verdict.state == "running"
    assert not question.movement_file.exists()


def test_who_must_not_write_counts_on_from_what_is_known(question: Question, pair: Pair) -> None:
    pair.script(stalled=True)
    finish = in_background(pair, "hello", max_tokens=3)
    look(replace(question, remembers=False))
    assert not question.movement_file.exists()
    look(question)
    kept = question.movement_file.read_bytes()
    assert look(replace(question, remembers=False)).verdict.state == "stalled"
    pair.script()
    finish()
    assert look(replace(question, remembers=False)).verdict.state == "running"
    assert question.movement_file.read_bytes() == kept


def test_movement_of_another_container_says_nothing(question: Question, pair: Pair) -> None:
    pair.script(stalled=True)
    finish = in_background(pair, "hello", max_tokens=3)
    look(question)
    newer = make_pair(DockerNode(ours(0, id="another")), DockerNode(ours(1)))
    assert look(replace(question, cluster=newer)).verdict.state == "running"
    pair.script()
    finish()


def test_an_unreadable_memory_of_movement_begins_anew(question: Question, pair: Pair) -> None:
    question.movement_file.parent.mkdir()
    question.movement_file.write_text('{"container": "id-')
    pair.script(stalled=True)
    finish = in_background(pair, "hello", max_tokens=3)
    assert look(question).verdict.state == "running"
    pair.script()
    finish()


def test_another_api_key_is_degraded_and_says_so(question: Question) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path == "/health" else 401, text="a key is needed")

    endpoint = Endpoint("http://engine", "flash", SecretStr("sk-old"), httpx.MockTransport(answer))
    status = look(replace(question, endpoint=endpoint))
    assert (status.verdict.state, status.verdict.exit_code) == ("degraded", 5), told(status)
    assert "HTTP 401: another API key than ours" in told(status)
    assert "sk-old" not in told(status)


def test_an_idle_engine_that_hangs_is_stalled(question: Question, pair: Pair) -> None:
    pair.script(completions="hang")
    begun = time.monotonic()
    status = look(question)
    assert status.verdict.state == "stalled", told(status)
    assert time.monotonic() - begun < 60
    assert "within 5 s" in told(status)


def test_failing_completions_are_degraded(question: Question, pair: Pair) -> None:
    pair.script(completions="fail")
    status = look(question)
    assert (status.verdict.state, status.verdict.exit_code) == ("degraded", 5)
    assert "the engine failed, as scripted" in told(status)


def test_another_model_name_is_degraded(question: Question, pair: Pair) -> None:
    pair.script(wrong_model_name="other")
    assert "`flash` does not exist" in told(look(question))


def test_a_failing_health_is_degraded_though_it_answers(question: Question, pair: Pair) -> None:
    pair.script(health="fail")
    status = look(question)
    assert status.verdict.state == "degraded"
    assert "/health answers HTTP 503" in told(status)


def test_a_lost_rank_is_seen_though_health_says_ok(question: Question, pair: Pair) -> None:
    pair.ranks[1].kill()
    wait_until(lambda: "the lane is broken" in pair.log(0))
    assert pair.client.get("/health").status_code == 200
    # the container's state lags in this test: only the completion can tell
    status = look(question)
    assert status.verdict.state == "degraded", told(status)
    assert "this lane lost a rank" in told(status)


def test_a_broken_lane_in_the_log_is_enough(question: Question, pair: Pair) -> None:
    head = DockerNode(ours(0, log=[(time.time(), "[tensorfold] the lane is broken (rank 1: gone); every step fails")]))
    status = look(replace(question, cluster=make_pair(head, DockerNode(ours(1)))))
    assert status.verdict.state == "degraded"
    assert "a rank is lost" in told(status)
    assert pair.metrics()["tensorfold:requests_total"] == 0


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ({"ending": "answered"}, "degraded"),
        ({"ending": "under way"}, "starting"),
        ({"ending": "answered", "begun": -1000.0}, "starting"),  # it was brought back since
        ({"run": "run-0", "ending": "answered"}, "starting"),
    ],
)
def test_closed_http_is_judged_by_whether_these_containers_have_answered(
    question: Question, pair: Pair, record: dict[str, Any], state: str
) -> None:
    pair.stop()
    begun = time.time() + record.pop("begun", 0.0)
    made = Record(
        **{"run": "run-1", "ending": "", **record}, command="start", recipe="", begun=begun, decided={}, pair={}
    )
    save_record(question.state / "runs", replace(made, seconds=1.0))
    assert look(question).verdict.state == state


@pytest.mark.parametrize(("first_start", "state"), [(True, "starting"), (False, "degraded")])
def test_a_later_start_has_its_own_deadline(question: Question, pair: Pair, first_start: bool, state: str) -> None:
    pair.stop()
    limits = question.recipe.readiness
    ago = (limits.first_seconds + limits.later_seconds) / 2
    assert limits.later_seconds < limits.first_seconds
    save_record(question.state / "runs", Record("run-1", "start", "", 0.0, {}, {"first_start": first_start}))
    begun = time.time() - ago
    cluster = make_pair(DockerNode(ours(0, started=begun)), DockerNode(ours(1, started=begun)))
    assert look(replace(question, cluster=cluster)).verdict.state == state


def test_closed_http_is_starting_with_the_phase_of_each_rank(question: Question, pair: Pair) -> None:
    pair.stop()
    head = DockerNode(ours(0, log=[(time.time(), "[tensorfold] rank 0: layers 0..19 loaded (3 s, 40 GiB)")]))
    status = look(replace(question, cluster=make_pair(head, DockerNode(ours(1)))))
    assert (status.verdict.state, status.verdict.exit_code) == ("starting", 5)
    assert "rank 0: loading layers 19" in told(status)


def test_a_node_that_cannot_be_asked_makes_it_unknown(question: Question) -> None:
    gone = SparkserveError("ssh_timeout", "no answer", node="worker", exit_code=EXIT_COULD_NOT_LOOK)
    cluster = make_cluster(head=DockerNode(ours(0)).session, worker=FakeSession({"facts": gone}))
    status = look(replace(question, cluster=cluster))
    assert (status.verdict.state, status.verdict.exit_code) == ("unknown", 6)
    assert status.unseen["worker"].code == "ssh_timeout"
    assert status_data(View(status, None))["nodes"]["head"]["container"] == "running"


@pytest.mark.parametrize("problem", ["missing", "refused", "permission", "timeout"])
def test_a_docker_engine_that_cannot_be_asked_is_no_empty_one(question: Question, problem: str) -> None:
    def facts(docker: list[str], **_fields: object) -> dict[str, object]:
        return {"time": 1.0, "files": {"/proc/meminfo": ""}, "docker": {path: {"error": problem} for path in docker}}

    cluster = make_cluster(head=FakeSession({"facts": facts}), worker=DockerNode().session)
    status = look(replace(question, cluster=cluster))
    assert status.verdict.state == "unknown"
    assert DOCKER_PROBLEMS[problem][0] in told(status)


def test_a_stranger_on_the_port_is_not_asked_while_nothing_of_ours_runs(question: Question, pair: Pair) -> None:
    status = look(replace(question, cluster=make_pair(DockerNode(), DockerNode())))
    assert status.verdict.state == "stopped"
    assert pair.metrics()["tensorfold:requests_total"] == 0
