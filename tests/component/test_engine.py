from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from pydantic import SecretStr

from sparkserve import engine_stop, source_checks
from sparkserve.checks import Check
from sparkserve.cluster import Cluster, Deployment, Node, Role
from sparkserve.container import ContainerSpec, build_spec
from sparkserve.endpoint import Endpoint
from sparkserve.engine import Launch, foreign_refusals, gather, new_run, plan, plan_stop
from sparkserve.engine_logs import LogQuery, read_logs, read_saved, saved_runs
from sparkserve.engine_stop import Stopping, stop
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_NOT_READY, SparkserveError, flatten
from sparkserve.plan import ApplyReport, Cancelled, Plan, apply
from tests.component.docker_node import Container, DockerNode, ours
from tests.fakes import FakeHost, FakeSession, RecordingReporter, RecordingWork
from tests.unit.cases import wait_for
from tests.unit.deployments import FILES, IMAGE, LINKS, make_deployment, make_pair

TEE = ["tee", "/proc/sys/vm/drop_caches"]
DROP_CACHES = {False: TEE, True: ["sudo", "-n", "--", *TEE]}


@dataclass
class Scene:
    """Two nodes with scripted containers, an engine's HTTP, and what is to be started."""

    directory: Path
    head: DockerNode = field(default_factory=DockerNode)
    worker: DockerNode = field(default_factory=DockerNode)
    recipe: dict[str, Any] = field(default_factory=dict)
    answers: Callable[[httpx.Request], httpx.Response] | None = None
    requests: list[str] = field(default_factory=list)
    uid: int = 1000
    settings: dict[str, Any] = field(default_factory=dict)
    hosts: dict[str, FakeHost] = field(default_factory=lambda: {"head": FakeHost("head"), "worker": FakeHost("worker")})

    @property
    def nodes(self) -> tuple[DockerNode, DockerNode]:
        return self.head, self.worker

    @property
    def cluster(self) -> Cluster:
        pair = make_pair(head=self.head.session, worker=self.worker.session)
        for node, docker in zip(pair.nodes, self.nodes, strict=True):
            node.__dict__["docker"] = docker
            node.identity = {"home": f"/home/{node.role}", "uid": self.uid}
            self.hosts[node.role].script(DROP_CACHES[self.uid != 0], always=True)
            self.hosts[node.role].script(["id", "-u"], f"{self.uid}\n".encode(), always=True)
            node.host = self.hosts[node.role]
        return pair

    @property
    def deployment(self) -> Deployment:
        made = make_deployment(cluster=self.cluster)
        readiness = made.recipe.readiness.model_copy(update=self.recipe)
        recipe = made.recipe.model_copy(update={"readiness": readiness})
        return replace(made, recipe=recipe, settings=made.settings.model_copy(update=self.settings))

    def serve(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request.url.path)
        if self.answers is None:
            raise httpx.ConnectError("refused")
        return self.answers(request)

    def launch(self, **more: Any) -> Launch:
        deployment = self.deployment
        specs: dict[Role, Any] = {
            role: build_spec(deployment, rank, LINKS, FILES, IMAGE) for rank, role in enumerate(LINKS)
        }
        endpoint = Endpoint(
            "http://engine", deployment.recipe.parameters.model_name, None, httpx.MockTransport(self.serve)
        )
        secrets = (SecretStr("sk-very-secret"),)
        return Launch(specs, "run-2", endpoint, self.directory / "runs", secrets=secrets, **more)

    def plan(self, **more: Any) -> list[Any]:
        return self.plan_of(self.launch(**more))

    def plan_of(self, launch: Launch) -> list[Any]:
        deployment = self.deployment
        return plan(deployment, deployment.cluster.on_both(gather), launch)

    def apply(self, **more: Any) -> ApplyReport:
        return apply(Plan(tuple(self.plan(**more))), RecordingReporter())

    def fail(self, **more: Any) -> SparkserveError:
        with pytest.raises(SparkserveError) as caught:
            self.apply(**more).raise_failures()
        return flatten(caught.value)[0]

    def wanted(self, **more: Any) -> None:
        """Let the pair run as wanted already."""
        for node, (role, spec) in zip(self.nodes, self.launch().specs.items(), strict=True):
            del role
            rank = 0 if node is self.head else 1
            node.containers = [ours(rank, spec=spec.digest, **more)]

    def later(self, seconds: float, act: Callable[[], Any]) -> None:
        threading.Timer(seconds, act).start()

    def started(self, node: DockerNode) -> Container:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if node.containers and node.containers[0].id.startswith("new-"):
                return node.containers[0]
            time.sleep(0.01)
        raise AssertionError("no container was started")

    def when_both_run(self, act: Callable[[Container, Container], Any]) -> None:
        threading.Thread(target=lambda: act(self.started(self.head), self.started(self.worker)), daemon=True).start()


NAME = make_deployment().recipe.parameters.model_name


def test_runs_sort_by_their_time_also_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = iter(f"{9 - number:04x}" for number in range(10))
    monkeypatch.setattr("secrets.token_hex", lambda _size: next(digits))
    runs = []
    for _ in range(10):
        runs.append(new_run())
        time.sleep(0.002)
    assert runs == sorted(runs)


def good(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": NAME}]})
    if request.url.path == "/health":
        return httpx.Response(200)
    choice = {"message": {"content": "a"}, "finish_reason": "length"}
    return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 1}})


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def told(changes: list[Any]) -> list[tuple[str, str, str]]:
    return [(change.node, change.resource, change.before) for change in changes]


# -- plan -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["running", "unknown"])
def test_a_pair_that_answers_as_wanted_or_could_not_be_seen_is_left_alone(scene: Scene, state: str) -> None:
    scene.wanted()
    assert scene.plan(seen=state) == []


def test_a_pair_that_still_loads_is_only_waited_for(scene: Scene) -> None:
    scene.wanted()
    assert told(scene.plan(seen="starting")) == [("head", "ready", "no answer")]


def test_nothing_there(scene: Scene) -> None:
    changes = scene.plan(needs=("head/build/image",))
    assert told(changes) == [
        ("worker", "sparkserve-rank1", "absent"),
        ("head", "sparkserve-rank0", "absent"),
        ("head", "ready", "no answer"),
    ]
    assert {change.step for change in changes} == {"start"}
    assert "head/build/image" in changes[0].needs
    assert changes[0].key in changes[1].needs
    assert changes[1].key in changes[2].needs


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda scene: scene.worker.containers.clear(), "worker: absent"),
        (lambda scene: scene.worker.containers[0].end(1), "worker: exited (exit code 1)"),
        (lambda scene: scene.head.containers[0].end(137, oom_killed=True), "head: killed by the kernel for memory"),
        (
            lambda scene: scene.head.containers[0].labels.update({"sparkserve.spec": "sha256:old"}),
            "head: runs with older settings, spec old",
        ),
        (lambda scene: scene.head.containers[0].processes.pop(), "running without a working engine process"),
        (lambda scene: scene.worker.containers[0].labels.update({"sparkserve.run": "other"}), "its peer is not"),
    ],
)
def test_whatever_is_wrong_both_ranks_are_replaced(scene: Scene, spoil: Callable[[Scene], Any], words: str) -> None:
    scene.wanted()
    spoil(scene)
    changes = scene.plan(seen="running")
    assert [change.resource for change in changes] == ["old pair", "sparkserve-rank1", "sparkserve-rank0", "ready"]
    assert words.replace("head: killed", "head: exited (killed") in changes[0].before
    assert all(change.before != change.after for change in changes)
    assert changes[0].key in changes[1].needs


def test_rank_0_starts_once_rank_1_has_opened_its_port(scene: Scene) -> None:
    scene.recipe = {"worker_port": "master"}
    scene.answers = good
    port = make_deployment().recipe.ports.master
    seen: list[bool] = []

    def open_port() -> None:
        worker = scene.started(scene.worker)
        wait_for(lambda: worker.id in scene.worker.guarded, "the worker's memory is guarded meanwhile")
        seen.append(bool(scene.head.containers))
        scene.worker.listening = {port}

    threading.Thread(target=open_port, daemon=True).start()
    scene.apply().raise_failures()
    assert seen == [False]
    assert scene.head.containers


@pytest.mark.parametrize(
    ("change", "act", "code", "words"),
    [
        ({}, lambda worker: worker.end(1), "rank_ended", "before it opened port"),
        ({"first_seconds": 0, "later_seconds": 0}, None, "start_timeout", "did not open port"),
    ],
)
def test_a_port_that_rank_1_does_not_open_ends_the_start(
    scene: Scene, change: dict[str, Any], act: Callable[[Container], Any] | None, code: str, words: str
) -> None:
    scene.recipe = {"worker_port": "master", **change}

    def end() -> None:
        wait_for(lambda: "start sparkserve-rank1" in scene.worker.events, "rank 1 runs")
        if act is not None:
            act(scene.started(scene.worker))

    threading.Thread(target=end, daemon=True).start()
    error = scene.fail()
    assert (error.code, error.node) == (code, "worker")
    assert words in error.message
    assert "create sparkserve-rank0" not in scene.head.events
    assert scene.worker.containers == []


@pytest.mark.parametrize("state", ["stalled", "degraded"])
def test_a_pair_that_is_broken_inside_is_replaced(scene: Scene, state: str) -> None:
    scene.wanted()
    assert [change.before for change in scene.plan(seen=state)][1:3] == ["running, does not serve"] * 2


def test_a_pair_of_older_settings_is_not_said_to_serve_nobody(scene: Scene) -> None:
    scene.wanted()
    scene.head.containers[0].labels["sparkserve.spec"] = "sha256:old"
    changes = scene.plan(seen="degraded")
    assert changes[0].before == "head: runs with older settings, spec old; worker: running, its peer is not as wanted"
    assert changes[-1].before == "not asked, runs with older settings"


def test_a_stranger_with_our_name_is_refused_on_both_nodes(scene: Scene) -> None:
    for node, name in zip(scene.nodes, ("sparkserve-rank0", "sparkserve-rank1"), strict=True):
        node.containers = [Container(name, {"app": "other"}), Container("web", {})]
    errors = foreign_refusals(scene.cluster.on_both(gather))
    assert [(error.code, error.node, error.exit_code) for error in errors] == [
        ("name_taken", "head", EXIT_NOT_READY),
        ("name_taken", "worker", EXIT_NOT_READY),
    ]
    assert scene.head.events == scene.worker.events == []


# -- start ------------------------------------------------------------------------------------------------------------


def test_start_worker_then_head_and_wait_for_an_answer(scene: Scene) -> None:
    scene.later(0.6, lambda: setattr(scene, "answers", good))
    report = scene.apply()
    report.raise_failures()
    assert scene.worker.events == ["mkdir 3", "create sparkserve-rank1", "start sparkserve-rank1"]
    assert scene.head.events == ["mkdir 3", "create sparkserve-rank0", "start sparkserve-rank0"]
    assert scene.worker.containers[0].started < scene.head.containers[0].started
    assert scene.requests[-1] == "/v1/chat/completions"
    assert f"answered through {NAME}" in report.applied[-1].proof
    assert {node.containers[0].labels["sparkserve.run"] for node in scene.nodes} == {"run-2"}
    assert scene.plan(seen="running") == []


def test_an_old_pair_goes_before_the_new_one_comes_rank_0_first(scene: Scene) -> None:
    scene.head.containers, scene.worker.containers = [ours(0, log=[(1.0, "old words")])], [ours(1)]
    scene.answers = good
    order: list[str] = []
    scene.head.events = scene.worker.events = order
    scene.apply(seen="running").raise_failures()
    assert order[:4] == [
        "SIGTERM sparkserve-rank0",
        "remove sparkserve-rank0",
        "SIGTERM sparkserve-rank1",
        "remove sparkserve-rank1",
    ]
    assert order.index("create sparkserve-rank1") > 3
    assert [line.text for line in read_saved(scene.directory / "runs", "run-1", LogQuery())] == ["old words"]


def test_a_rank_that_dies_ends_both_at_once_with_its_reason(scene: Scene) -> None:
    def act(head: Container, worker: Container) -> None:
        worker.say("[tensorfold] rank 1: layers 0..19 loaded (1 s, 40 GiB)")
        worker.say("Traceback (most recent call last):")
        worker.say("  File 'engine.py', line 7, in load sk-very-secret")
        worker.say("ValueError: shard 7 is short; key sk-very-secret")
        time.sleep(0.05)
        head.say("RuntimeError: NCCL error 6: remote process exited")
        worker.end(3)

    scene.when_both_run(act)
    begun = time.monotonic()
    error = scene.fail()
    assert time.monotonic() - begun < 60
    assert (error.code, error.node) == ("rank_ended", "worker")
    assert "rank 1 ended after" in error.message
    assert "in phase 'loading layers 19': exit code 3" in error.message
    assert "first error, rank 1 at" in error.details
    assert "ValueError: shard 7 is short; key ***" in error.details
    assert "sk-very-secret" not in error.details
    assert scene.head.containers == scene.worker.containers == []
    assert saved_runs(scene.directory / "runs") == ["run-2"]
    saved = (scene.directory / "runs" / "run-2" / "rank1.log").read_text()
    assert "Traceback" in saved
    assert "sk-very-secret" not in saved
    assert (scene.directory / "runs" / "run-2" / "rank0.log").stat().st_mode & 0o777 == 0o600


def test_a_known_failure_of_the_log_ends_the_wait_with_cause_and_advice(scene: Scene) -> None:
    scene.when_both_run(lambda head, worker: head.say("[tensorfold] WARNING: no Engram tables (TF_DS_ENGRAM)"))
    error = scene.fail()
    assert (error.code, error.node) == ("engine_failed", "head")
    assert "cause: the engine found no Engram tables" in error.details
    assert error.hint.startswith("sparkserve download proves")
    assert "sparkserve logs" in error.hint
    assert scene.head.containers == scene.worker.containers == []


def test_a_warning_of_the_log_is_told_and_ends_nothing(scene: Scene) -> None:
    def act(head: Container, worker: Container) -> None:
        head.say("kernel: NVRM: nvCheckOkFailed NV_ERR_NO_MEMORY")
        time.sleep(0.6)
        scene.answers = good

    scene.when_both_run(act)
    report = scene.apply()
    report.raise_failures()
    assert "warning: the driver found no free memory" in report.applied[-1].proof


@pytest.mark.parametrize(
    ("line", "cause", "advice"),
    [
        ("[tensorfold] rank 0 finished layers; waiting for rank 1", "one rank waits for the other", "stale lock files"),
        ("NV_ERR_NO_MEMORY", "the driver found no free memory", "reboot it"),
    ],
)
def test_a_start_that_takes_too_long_tells_what_was_known_to_slow_it(
    scene: Scene, line: str, cause: str, advice: str
) -> None:
    scene.recipe = {"first_seconds": 1, "later_seconds": 1}
    scene.when_both_run(lambda head, worker: head.say(line))
    error = scene.fail()
    assert error.code == "start_timeout"
    (told,) = [text for text in error.details.splitlines() if text.startswith("warning: ")]
    assert cause in told
    assert advice in told


@pytest.mark.parametrize("program", ["journal", "dmesg"])
@pytest.mark.parametrize(("ago", "warnings"), [(0.0, ["the driver found no free memory"]), (3600.0, [])])
def test_what_the_kernel_said_since_the_start_is_told_with_the_failure(
    scene: Scene, program: str, ago: float, warnings: list[str]
) -> None:
    def act(head: Container, worker: Container) -> None:
        stamped = datetime.fromtimestamp(time.time() + scene.worker.clock - ago, UTC).isoformat()
        line = f"{stamped} spark-2 kernel: NVRM: nvCheckOkFailedNoLog: NV_ERR_NO_MEMORY from _memdescAllocInternal"
        # A journal that this account may not read is an empty one.
        scene.worker.kernel = {"journal": "", program: f"-- no date\n\n{line}\n"}
        worker.end(3)

    scene.worker.clock = 5000.0
    scene.when_both_run(act)
    error = scene.fail()
    assert error.code == "rank_ended"
    told = [text.split(": ")[1] for text in error.details.splitlines() if text.startswith("warning: ")]
    assert told == warnings


def test_an_exit_code_that_the_recipe_knows_is_told_as_a_line_is(scene: Scene) -> None:
    scene.when_both_run(lambda head, worker: worker.end(70))
    assert "warning: a rank ended because the other one did: look at the other node's log" in scene.fail().details


def test_a_kernel_that_cannot_be_asked_hides_no_failure(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[str]:
        raise SparkserveError("connection_lost", "gone", "look there")

    monkeypatch.setattr("sparkserve.engine_watch.kernel_lines", refuse)
    scene.when_both_run(lambda head, worker: worker.end(3))
    assert scene.fail().code == "rank_ended"


def test_both_ranks_that_end_at_once_are_told(scene: Scene) -> None:
    def act(head: Container, worker: Container) -> None:
        worker.end(3)
        head.end(4)

    scene.when_both_run(act)
    error = scene.fail()
    assert error.code == "rank_ended"
    assert re.search(r"rank \d ended after .*: exit code \d; rank \d ended too: exit code \d$", error.message)
    assert {"exit code 3", "exit code 4"} <= set(re.findall(r"exit code \d", error.message))


def test_a_rank_that_its_nodes_memory_guard_killed(scene: Scene) -> None:
    def act(head: Container, worker: Container) -> None:
        wait_for(lambda: bool(scene.worker.guarded), "the guard watches")
        # The other rank is seen to end first: the guard's word still comes before its own.
        head.end(1)
        scene.worker.guard_kills(worker, 700_000_000)

    scene.when_both_run(act)
    error = scene.fail()
    assert (error.code, error.node) == ("memory_floor", "worker")
    assert "0.7 GiB of memory were left, needed: 1 GiB" in error.message
    assert scene.worker.guarded == {"new-sparkserve-rank1": 2**30}
    assert scene.head.guarded == {"new-sparkserve-rank0": 2**30}
    assert scene.head.containers == scene.worker.containers == []


def test_memory_that_went_since_the_preflight_stops_the_start(scene: Scene) -> None:
    scene.head.available_kb = 50_000_000
    error = scene.fail()
    assert (error.code, error.node, error.exit_code) == ("memory_short", "head", EXIT_NOT_READY)
    assert "47.7 GiB of memory available; needed before a start: 108 GiB" in error.message
    assert not any(event.startswith("create") for event in scene.worker.events)


def test_memory_that_is_still_on_its_way_back_is_only_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stop, "_LATE_SECONDS", 0.0)
    scene.head.containers, scene.worker.containers = [ours(0)], [ours(1)]
    scene.head.available_kb = 50_000_000
    scene.answers = good
    report = scene.apply(seen="running")
    report.raise_failures()
    assert any("head: 47.7 GiB of memory available; needed before" in item.proof for item in report.applied)


@pytest.mark.parametrize("has_pair", [False, True])
def test_files_that_were_still_to_be_made_are_read_before_anything_is_stopped_or_started(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, has_pair: bool
) -> None:
    looked: list[str] = []

    def closed(node: Node, spec: ContainerSpec) -> Check:
        looked.append(spec.name)
        return Check("source", node.role, "fail" if node.role == "worker" else "ok", "it is closed", "an open one")

    monkeypatch.setattr(source_checks, "check_sources", closed)
    if has_pair:
        scene.head.containers, scene.worker.containers = [ours(0)], [ours(1)]
    error = scene.fail(seen="running", needs=("head/build/image",))
    assert (error.code, error.node, error.exit_code) == ("check_source", "worker", EXIT_NOT_READY)
    assert sorted(looked) == ["sparkserve-rank0", "sparkserve-rank1"]
    assert scene.head.events == scene.worker.events == []
    assert len(scene.head.containers) == len(scene.worker.containers) == has_pair
    scene.answers = good
    scene.apply(seen="running", needs=("head/build/image",), skipped_checks=("source",)).raise_failures()
    scene.apply(seen="degraded").raise_failures()
    assert len(looked) == 2, "nothing was to be made: the preflight looked"


def test_what_a_late_look_could_not_see_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def unseen(node: Node, _spec: ContainerSpec) -> Check:
        return Check("source", node.role, "unseen", "no `sh`", "")

    monkeypatch.setattr(source_checks, "check_sources", unseen)
    scene.answers = good
    report = scene.apply(needs=("head/build/image",))
    report.raise_failures()
    assert report.applied[0].proof.endswith("; head: no `sh`; worker: no `sh`")


def test_a_docker_engine_that_ended_is_named_before_the_rank_that_missed_it(scene: Scene) -> None:
    def act(head: Container, worker: Container) -> None:
        wait_for(lambda: bool(scene.requests), "the wait has begun")
        scene.worker.problem = "refused"
        time.sleep(0.1)
        head.end(1)

    scene.when_both_run(act)
    error = scene.fail()
    assert (error.code, error.node, error.exit_code) == ("rank_ended", "worker", EXIT_COULD_NOT_LOOK)
    assert re.search(
        r"rank 1 was lost .*: the Docker engine does not run; rank 0 ended too: exit code 1$", error.message
    )
    assert error.hint.startswith("sudo systemctl start docker")


def test_a_docker_engine_that_ended_is_named_before_what_the_other_rank_says_of_it(scene: Scene) -> None:
    def act(head: Container, worker: Container) -> None:
        wait_for(lambda: bool(scene.requests), "the wait has begun")
        with scene.worker.answering, scene.head.answering:
            scene.worker.problem = "refused"
            head.say("RuntimeError: NCCL error 6: remote process exited or network error")

    scene.when_both_run(act)
    error = scene.fail()
    assert (error.code, error.node, error.exit_code) == ("rank_ended", "worker", EXIT_COULD_NOT_LOOK)
    assert "NCCL error 6" in error.details


@pytest.mark.parametrize("late", [0, 1])
def test_of_two_ranks_that_ended_the_earlier_one_is_named_whatever_the_clocks_say(scene: Scene, late: int) -> None:
    """The other node's clock is an hour ahead, and a look meets both ranks at their end."""
    scene.worker.clock = 3600.0

    def act(head: Container, worker: Container) -> None:
        ranks = (head, worker)
        ended = time.time()
        with scene.worker.answering, scene.head.answering:
            ranks[late].end(5 + late)
            ranks[1 - late].end(6 - late)
            head.finished, worker.finished = ended - 0.2 * late, ended + 3600.0 - 0.2 * (1 - late)

    scene.when_both_run(act)
    error = scene.fail()
    assert (error.code, error.node) == ("rank_ended", ("worker", "head")[late])


def test_the_kernel_killed_a_rank(scene: Scene) -> None:
    scene.when_both_run(lambda head, worker: head.end(137, oom_killed=True))
    assert "killed by the kernel for memory, exit code 137" in scene.fail().message


def test_a_container_that_vanished(scene: Scene) -> None:
    def act(head: Container, worker: Container) -> None:
        wait_for(lambda: bool(scene.requests), "the wait has begun")
        scene.worker.containers.remove(worker)

    scene.when_both_run(act)
    error = scene.fail()
    assert "its container was removed" in error.message
    assert scene.head.containers == []


@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        (lambda _r: httpx.Response(200, json={"data": [{"id": "other"}]}), "model_name", "serves other, not"),
        (lambda _r: httpx.Response(401, text="key?"), "endpoint_refused", "HTTP 401"),
    ],
)
def test_http_that_will_never_answer_ends_the_wait(
    scene: Scene, answer: Callable[[httpx.Request], httpx.Response], code: str, words: str
) -> None:
    scene.answers = answer
    begun = time.monotonic()
    error = scene.fail()
    assert time.monotonic() - begun < 60
    assert error.code == code
    assert words in error.message
    assert scene.head.containers == scene.worker.containers == []


def test_health_alone_is_not_ready(scene: Scene) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return good(request) if request.method == "GET" else httpx.Response(500, text="EngineCore issue")

    scene.answers = answer
    scene.recipe = {"later_seconds": 2}
    error = scene.fail()
    assert error.code == "start_timeout"
    assert "rank 0: no phase seen" in error.message
    assert scene.requests.count("/v1/chat/completions") >= 2


def test_a_completion_that_hangs_ends_at_the_deadline(scene: Scene) -> None:
    ended = threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            ended.wait(100)
        return good(request)

    scene.answers = answer
    scene.recipe = {"later_seconds": 2}
    reporter, begun = RecordingReporter(), time.monotonic()
    report = apply(Plan(tuple(scene.plan())), reporter)
    ended.set()
    assert time.monotonic() - begun < 60
    assert [error.code for _, error in report.failed] == ["start_timeout"]
    assert any("waiting for the first token" in str(event) for event in reporter.events)
    assert scene.head.containers == scene.worker.containers == []


def test_the_first_start_has_a_deadline_of_its_own(scene: Scene) -> None:
    scene.recipe = {"first_seconds": 1, "later_seconds": 100}
    assert "no answer within 1 s" in scene.fail(first_start=True).message


def test_the_warm_up_is_part_of_the_start(scene: Scene) -> None:
    sizes: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            sizes.append(len(json.loads(request.content)["messages"][0]["content"].split()))
        return good(request)

    scene.answers = answer
    scene.recipe = {"warm_up_tokens": 2000}
    scene.apply().raise_failures()
    assert sizes == [1, 1500]


@pytest.mark.parametrize(
    ("daemon", "code"),
    [
        ('exec: "/opt/engine": no such file or directory', "image_entrypoint"),
        ("error gathering device information while adding custom device", "device_missing"),
        ('could not select device driver "" with capabilities: [[gpu]]', "gpu_refused"),
        ("something else", "docker_refused"),
    ],
)
def test_a_head_that_cannot_start_takes_the_worker_back(scene: Scene, daemon: str, code: str) -> None:
    scene.head.refusal = daemon
    error = scene.fail()
    assert (error.code, error.node) == (code, "head")
    assert daemon in error.details
    assert scene.worker.containers == []
    assert "SIGTERM sparkserve-rank1" in scene.worker.events


def test_a_rank_that_hangs_is_killed_soon_after_a_failed_start(scene: Scene) -> None:
    def act(head: Container, worker: Container) -> None:
        head.ignores_sigterm = True
        worker.end(1)

    scene.when_both_run(act)
    begun = time.monotonic()
    scene.fail()
    assert time.monotonic() - begun < 60
    assert scene.head.events[-3:] == ["SIGTERM sparkserve-rank0", "SIGKILL sparkserve-rank0", "remove sparkserve-rank0"]


def test_an_interrupt_while_waiting_takes_both_back(scene: Scene) -> None:
    changes = scene.plan()
    for change in changes[:2]:
        change.action(RecordingWork())
    with pytest.raises(Cancelled):
        changes[2].action(RecordingWork(cancel_after=1))
    assert scene.head.containers == scene.worker.containers == []


def test_an_interrupt_while_the_old_pair_ends_leaves_no_rank_alone(scene: Scene) -> None:
    scene.head.containers, scene.worker.containers = [ours(0)], [ours(1, ignores_sigterm=True)]
    with pytest.raises(Cancelled):
        scene.plan()[0].action(RecordingWork(cancel_after=1))
    assert scene.head.events[0] == "SIGTERM sparkserve-rank0"
    assert scene.head.containers == scene.worker.containers == []


def test_an_interrupt_between_the_ranks_takes_the_first_back(scene: Scene) -> None:
    worker = scene.plan()[0]
    with pytest.raises(Cancelled):
        worker.action(RecordingWork(cancel_after=0))
    assert scene.worker.containers == []


def test_a_worker_that_falls_silent_ends_the_wait_and_the_head(scene: Scene) -> None:
    lost = SparkserveError("connection_lost", "the SSH connection ended", node="worker", exit_code=EXIT_COULD_NOT_LOOK)

    def act(head: Container, worker: Container) -> None:
        wait_for(lambda: bool(scene.requests), "the wait has begun")

        def silent(**_fields: Any) -> Any:
            raise lost

        answers = cast("Any", scene.worker.session)._answers
        answers["facts"] = silent

    scene.when_both_run(act)
    error = scene.fail()
    assert (error.code, error.exit_code, error.node) == ("node_silent", EXIT_COULD_NOT_LOOK, "worker")
    assert scene.head.containers == []
    assert "not cleaned up: worker: the SSH connection ended" in error.details


def test_progress_tells_both_ranks(scene: Scene) -> None:
    def act(head: Container, worker: Container) -> None:
        head.say("[tensorfold] rank 0: layers 0..9 loaded (1 s)")
        worker.say("[tensorfold] rank 1: layers 0..4 loaded (1 s)")
        worker.say("")
        wait_for(lambda: "loading layers 4;" in str(reporter.events), "both ranks' phases are told")
        scene.answers = good

    reporter = RecordingReporter()
    scene.when_both_run(act)
    apply(Plan(tuple(scene.plan())), reporter).raise_failures()
    notes = [text for kind, key, *rest in reporter.events if kind == "note" for text in rest]
    assert any(
        "rank 0: loading layers 9; rank 1: loading layers 4; HTTP closed; 115.4 / 115.4 GiB available" in text
        and text.endswith("s | rank 1 says: [tensorfold] rank 1: layers 0..4 loaded (1 s)")
        for text in notes
    ), notes


# -- stop -------------------------------------------------------------------------------------------------------------


def stopping(scene: Scene, **more: Any) -> Stopping:
    return Stopping(scene.directory / "runs", **more)


def test_stop_ends_rank_0_first_and_only_what_is_ours(scene: Scene) -> None:
    order: list[str] = []
    scene.head.containers, scene.worker.containers = [ours(0), Container("web", {})], [ours(1)]
    scene.head.events = scene.worker.events = order
    report = stop(scene.cluster, stopping(scene))
    assert order == [
        "SIGTERM sparkserve-rank0",
        "remove sparkserve-rank0",
        "SIGTERM sparkserve-rank1",
        "remove sparkserve-rank1",
    ]
    assert [container.name for container in scene.head.containers] == ["web"]
    assert "ended in order" in report
    assert "nothing of ours is left" in report


def test_stop_when_nothing_runs(scene: Scene) -> None:
    assert stop(scene.cluster, stopping(scene)) == "nothing of ours was running"
    assert plan_stop(scene.cluster, scene.cluster.on_both(gather), stopping(scene)) == []


def test_stop_clears_leftovers(scene: Scene) -> None:
    scene.worker.containers = [ours(1)]
    scene.worker.containers[0].end(1)
    assert "was not running" in stop(scene.cluster, stopping(scene))
    assert scene.worker.events == ["remove sparkserve-rank1"]


def test_a_rank_that_ignores_the_signal_is_killed_after_its_time(scene: Scene) -> None:
    scene.head.containers = [ours(0, ignores_sigterm=True)]
    notes: list[str] = []
    assert "killed after 1 s" in stop(scene.cluster, stopping(scene, tell=notes.append))
    assert scene.head.events == ["SIGTERM sparkserve-rank0", "SIGKILL sparkserve-rank0", "remove sparkserve-rank0"]
    assert any("still there after 1 s" in note for note in notes)


def test_force_kills(scene: Scene) -> None:
    scene.head.containers, scene.worker.containers = [ours(0)], [ours(1)]
    stop(scene.cluster, stopping(scene, force=True))
    assert [node.events[0] for node in scene.nodes] == ["SIGKILL sparkserve-rank0", "SIGKILL sparkserve-rank1"]


@pytest.mark.parametrize(
    ("moments", "needed_gib"), [((0.6, 1.2), 0), ((1.6, 2.2), 110)], ids=["freed at once", "freed late"]
)
def test_stop_waits_for_memory(scene: Scene, moments: tuple[float, float], needed_gib: float) -> None:
    scene.head.containers, scene.worker.containers = [ours(0)], [ours(1)]
    scene.head.available_kb = 5_000_000
    for seconds, kb in zip(moments, (60_000_000, 118_000_000), strict=True):
        scene.later(seconds, lambda kb=kb: setattr(scene.head, "available_kb", kb))  # type: ignore[misc]
    scene.worker.available_kb = 118_000_000
    notes: list[str] = []
    report = stop(scene.cluster, stopping(scene, tell=notes.append, needed_gib=needed_gib))
    assert "+107.8 GiB available on both nodes together" in report
    assert any("memory comes back" in note for note in notes)


def test_stop_says_which_memory_is_not_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stop, "_LATE_SECONDS", 0.0)
    scene.head.containers, scene.worker.containers = [ours(0)], [ours(1)]
    scene.head.available_kb, scene.worker.available_kb = 15_000_000, 118_000_000
    report = stop(scene.cluster, stopping(scene, force=True, needed_gib=110))
    assert "memory of the head is not back: 14.3 GiB available, a start needs 110: `ps aux" in report
    assert "memory of the worker" not in report


def test_a_node_that_cannot_be_asked_is_told_and_the_other_is_stopped(scene: Scene) -> None:
    gone = SparkserveError("ssh_timeout", "no answer", node="worker", exit_code=EXIT_COULD_NOT_LOOK)
    scene.head.containers = [ours(0)]
    scene.worker.session = FakeSession({"facts": gone})
    with pytest.raises(SparkserveError) as caught:
        stop(scene.cluster, stopping(scene))
    assert (caught.value.exit_code, caught.value.node) == (EXIT_COULD_NOT_LOOK, "worker")
    assert flatten(caught.value)[0].details == "head: was asked, nothing of ours is left there"
    assert scene.head.containers == []
    facts, _ = scene.cluster.try_both(gather)
    assert "worker: could not be asked" in plan_stop(scene.cluster, facts, stopping(scene))[0].before


def test_a_container_that_survives_is_an_error_and_the_other_is_still_ended(scene: Scene) -> None:
    scene.head.containers, scene.worker.containers = [ours(0)], [ours(1)]
    head = cast("Any", scene.head)
    head.remove_container = lambda _id, force: None
    with pytest.raises(SparkserveError) as caught:
        stop(scene.cluster, stopping(scene))
    assert [(error.code, error.node) for error in flatten(caught.value)] == [("still_there", "head")]
    assert scene.worker.containers == []


def test_a_log_that_cannot_be_kept_does_not_keep_a_rank_alive(scene: Scene) -> None:
    scene.head.containers = [ours(0)]
    (scene.directory / "runs").write_text("a file in the way")
    notes: list[str] = []
    stop(scene.cluster, stopping(scene, tell=notes.append))
    assert scene.head.containers == []
    assert any("its log could not be kept" in note for note in notes)


# -- logs -------------------------------------------------------------------------------------------------------------


def test_logs_of_both_ranks_in_the_order_of_time(scene: Scene) -> None:
    now = time.time()
    scene.head.containers = [ours(0, log=[(now - 30, "a"), (now - 10, "c sk-very-secret")])]
    scene.worker.containers = [ours(1, log=[(now - 20, "b"), (now - 5, "d")])]
    query = LogQuery(secrets=(SecretStr("sk-very-secret"),))

    def texts(**more: Any) -> list[tuple[int, str]]:
        return [(line.rank, line.text) for line in read_logs(scene.cluster, replace(query, **more))]

    assert texts() == [(0, "a"), (1, "b"), (0, "c ***"), (1, "d")]
    assert texts(rank=1) == [(1, "b"), (1, "d")]
    assert texts(grep="[ad]$") == [(0, "a"), (1, "d")]
    assert texts(tail=1) == [(0, "c ***"), (1, "d")]
    assert texts(since=12.0) == [(0, "c ***"), (1, "d")]
    with pytest.raises(SparkserveError, match="no regular expression"):
        texts(grep="(")


def test_following_gives_each_line_once(scene: Scene) -> None:
    scene.head.containers, scene.worker.containers = [ours(0)], [ours(1)]
    scene.head.containers[0].say("first")
    lines = read_logs(scene.cluster, LogQuery(follow=True))
    assert next(lines).text == "first"
    scene.later(0.2, lambda: scene.worker.containers[0].say("second"))
    scene.later(0.9, lambda: scene.head.containers[0].say("third"))
    assert [next(lines).text, next(lines).text] == ["second", "third"]


def test_following_stays_with_a_pair_that_is_made_anew(scene: Scene) -> None:
    scene.head.containers, scene.worker.containers = [ours(0)], [ours(1)]
    scene.head.containers[0].say("first")
    lines = read_logs(scene.cluster, LogQuery(follow=True))
    assert next(lines).text == "first"
    scene.later(0.1, scene.head.containers.clear)
    scene.later(0.5, scene.worker.containers.clear)
    for seconds, node, rank in ((1.0, scene.worker, 1), (1.5, scene.head, 0)):
        again = ours(rank, id=f"new-{rank}", log=[(time.time() + seconds, f"rank {rank} again")])
        scene.later(seconds, lambda node=node, again=again: node.containers.append(again))  # type: ignore[misc]
    assert [next(lines).text, next(lines).text] == ["rank 1 again", "rank 0 again"]


def test_logs_of_a_pair_with_a_lost_node(scene: Scene) -> None:
    scene.head.containers = [ours(0, log=[(1.0, "still here")])]
    gone = SparkserveError("ssh_timeout", "no answer", node="worker", exit_code=EXIT_COULD_NOT_LOOK)
    scene.worker.session = FakeSession({"facts": gone})
    lines = read_logs(scene.cluster, LogQuery())
    assert next(lines).text == "still here"
    with pytest.raises(SparkserveError) as caught:
        next(lines)
    assert caught.value.exit_code == EXIT_COULD_NOT_LOOK


def test_logs_when_nothing_is_there(scene: Scene) -> None:
    with pytest.raises(SparkserveError) as caught:
        next(read_logs(scene.cluster, LogQuery()))
    assert caught.value.code == "not_running"


# -- what is given to the containers -----------------------------------------------------------------------------------


def test_the_page_caches_are_dropped_before_the_ranks_where_that_is_allowed(scene: Scene) -> None:
    scene.answers = good
    proofs = [item.proof for item in scene.apply().applied]
    assert proofs[0].endswith("page caches dropped"), proofs
    assert [call.stdin for host in scene.hosts.values() for call in host.calls if "tee" in call.argv] == [b"3\n"] * 2


def test_a_page_cache_that_may_not_be_dropped_is_told_and_stops_nothing(scene: Scene) -> None:
    scene.answers = good
    scene.hosts["worker"].script(DROP_CACHES[True], exit_code=1)
    proofs = [item.proof for item in scene.apply().applied]
    assert proofs[0].endswith("page cache kept on worker: sudo asks for a password"), proofs


@pytest.mark.parametrize(
    ("password", "refuses", "told"),
    [
        ("correct horse", 0, "page caches dropped"),
        ("wrong", 1, "page cache kept on worker: sudo asks for a password"),
        (None, 1, "page cache kept on worker: sudo asks for a password"),
    ],
)
def test_the_page_cache_is_dropped_with_the_password_of_the_settings(
    scene: Scene, password: str | None, refuses: int, told: str
) -> None:
    file, worker = scene.directory / "password", scene.hosts["worker"]
    scene.answers, scene.settings = good, {"sudo_password_file": file}
    worker.script(DROP_CACHES[True], exit_code=1, stderr=b"sudo: a password is required\n")
    if password is not None:
        file.write_text(f"{password}\n")
        file.chmod(0o600)
        worker.script(["sudo", "-k", "-S", "-p", "", "--", *TEE], exit_code=refuses)
    assert scene.apply().applied[0].proof.endswith(told)
    assert [call.stdin for call in worker.calls if "-S" in call.argv] == [f"{password}\n3\n".encode()] * bool(password)


def test_root_needs_no_sudo_for_it(scene: Scene) -> None:
    scene.answers, scene.uid = good, 0
    scene.apply()
    assert not any("sudo" in call.argv for host in scene.hosts.values() for call in host.calls)


@pytest.mark.parametrize("others", [[], [["9", "Sl", "engine that waits for it"]]])
def test_a_rank_whose_processes_stand_still_is_killed_at_once(scene: Scene, others: list[list[str]]) -> None:
    scene.wanted(processes=[["1", "Ss", "/sbin/docker-init"], ["7", "T", "engine"], *others], ignores_sigterm=True)
    begun = time.monotonic()
    report = stop(scene.cluster, Stopping(scene.directory / "runs"))
    assert report.count("(killed, ") == 2
    assert "SIGTERM sparkserve-rank0" not in scene.head.events
    assert time.monotonic() - begun < 60
