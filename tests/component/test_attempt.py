"""A start as an attempt: its record, what changed since one worked, and the pair that comes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkserve import attempt, link, planning, records
from sparkserve.engine import gather
from sparkserve.errors import Failures, SparkserveError
from sparkserve.plan import ApplyReport, Change, Plan, apply
from sparkserve.planning import Starting
from tests.component.docker_node import Container, ours
from tests.component.test_engine import Scene, good
from tests.fakes import RecordingReporter

EARLIER = "20250101T000000.000-aaaa"


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path / "state", answers=good)


def make(scene: Scene, *, run: str, replaces: str = "", **more: Any) -> ApplyReport:
    launch = replace(scene.launch(**more), run=run)
    changes = scene.plan_of(launch)
    links: Any = {}
    start = Starting(changes, links, launch, replaces)
    carry = lambda plan: apply(plan, RecordingReporter())  # noqa: E731 - as short as it gets
    return attempt.make(scene.deployment, start, "start", Plan(tuple(changes)), carry)


def endings(scene: Scene) -> list[tuple[str, str]]:
    return [(one.run, one.ending) for one in records.read_records(scene.directory / "runs")]


def test_an_attempt_that_answers_is_recorded(scene: Scene) -> None:
    report = make(scene, run="run-1")
    assert not report.failed
    assert endings(scene) == [("run-1", "answered")]
    decided = records.read_records(scene.directory / "runs")[0].decided
    images = ("sha256:image-of-sparkserve-rank0", "sha256:image-of-sparkserve-rank1")
    assert (decided["image id of the head"], decided["image id of the worker"]) == images


def test_a_disk_that_takes_no_record_keeps_no_pair_down(scene: Scene) -> None:
    scene.directory.mkdir()
    (scene.directory / "runs").write_text("a file in the way")
    assert not make(scene, run="run-1").failed


def test_a_failed_attempt_tells_what_changed(scene: Scene) -> None:
    make(scene, run="run-1")
    record = records.read_records(scene.directory / "runs")[0]
    records.save_record(
        scene.directory / "runs", replace(record, decided={**record.decided, "kernel of the head": "1"})
    )
    for node in scene.nodes:
        node.containers.clear()
    scene.head.refusal = "something else"
    (_, error), *_ = make(scene, run="run-2").failed
    assert "changed since run run-1, the last that answered:\n  kernel of the head: 1 -> not set" in error.details
    assert endings(scene) == [("run-2", "failed"), ("run-1", "answered")]


def change_of(step: str) -> Change:
    return Change("head", step, "sparkserve/x:1", "absent", "built", lambda _: "")


def test_a_failed_build_tells_what_changed_too(scene: Scene) -> None:
    make(scene, run="run-1")
    links: Any = {}
    error = SparkserveError("build_failed", "docker build failed", details="step 3")
    report = ApplyReport(failed=[(change_of("build"), error)])
    start = Starting([], links, scene.launch())
    attempt.make(scene.deployment, start, "up", Plan(()), lambda _: report)
    assert error.details.startswith("step 3\nchanged since run run-1, the last that answered:\n")


def refuse(scene: Scene, command: str) -> Failures:
    """Refuse a start that would wait for the pair of the earlier run."""
    links: Any = {}
    start = Starting([], links, replace(scene.launch(kernels={"head": "6.18"}), run=EARLIER))
    port = SparkserveError("check_port", "port 8888: held", node="worker")
    error = Failures([SparkserveError("name_taken", "has our name", node="head"), port])
    with pytest.raises(Failures), attempt.recorded(scene.deployment, start, command):
        raise error
    return error


def test_a_refused_start_is_recorded_and_tells_what_changed(scene: Scene) -> None:
    make(scene, run=EARLIER)
    error = refuse(scene, "start")
    refused, answered = records.read_records(scene.directory / "runs")
    assert (answered.run, answered.ending, refused.ending) == (EARLIER, "answered", "failed")
    assert refused.error == "head: has our name; worker: port 8888: held"
    told = f"changed since run {EARLIER}, the last that answered:\n  kernel of the head: not set -> 6.18"
    assert [one.details for one in error.errors] == [told, ""]


def test_what_a_watch_tries_every_ten_seconds_pushes_no_record_out(scene: Scene) -> None:
    make(scene, run=EARLIER)
    refuse(scene, "watch")
    assert endings(scene) == [(EARLIER, "answered")]


def created(scene: Scene) -> list[str]:
    return [event for node in scene.nodes for event in node.events if event.startswith("create")]


def test_a_failed_restart_of_the_same_pair_is_not_tried_once_more(scene: Scene) -> None:
    make(scene, run="run-1")
    for rank, (node, spec) in enumerate(zip(scene.nodes, scene.launch().specs.values(), strict=True)):
        node.containers = [ours(rank, run="run-1", spec=spec.digest)]
        node.events.clear()
    scene.when_both_run(lambda _head, worker: worker.end(1))
    scene.answers = None
    (_, error), *_ = make(scene, run="run-2", replaces="run-1", seen="degraded").failed
    assert "rank 1 ended" in error.message
    assert "brought back" not in error.details
    assert created(scene) == ["create sparkserve-rank0", "create sparkserve-rank1"]
    assert not any(node.containers for node in scene.nodes)


def test_the_replaced_pair_comes_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "Endpoint", lambda *_: scene.launch().endpoint)
    monkeypatch.setattr(link, "gather", lambda _node: None)
    make(scene, run="run-1")
    record = records.read_records(scene.directory / "runs")[0]
    decided = {**record.decided, "spec of the head": "old"}
    records.save_record(scene.directory / "runs", replace(record, decided=decided))
    for rank, node in enumerate(scene.nodes):
        node.containers = [ours(rank, run="run-1", spec="sha256:old")]
    refusals = iter(["no such flag"])
    real = scene.head.create_container

    def create(**options: Any) -> dict[str, str]:
        scene.head.refusal = next(refusals, "")
        return real(**options)

    scene.head.create_container = create  # type: ignore[method-assign] # the first start fails, the one back does not
    (_, error), *_ = make(scene, run="run-2", replaces="run-1").failed
    assert "run run-1) was brought back: answered" in error.details
    back = [container.labels["sparkserve.run"] for node in scene.nodes for container in node.containers]
    assert back == ["run-1", "run-1"]


def test_a_recorded_pair_is_refused_beside_a_stranger_with_our_name(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "gather", lambda _node: None)
    make(scene, run="run-1")
    runs = scene.directory / "runs"
    pair = records.pair_of(records.read_records(runs)[0])
    assert pair is not None
    scene.head.containers = [Container("sparkserve-rank0", {"app": "other"})]
    (refusal,) = planning.plan_recorded(scene.deployment, pair, "run-2", runs).refusals
    assert (refusal.code, refusal.node) == ("name_taken", "head")


def test_a_pair_that_never_answered_does_not_come_back(scene: Scene) -> None:
    for rank, node in enumerate(scene.nodes):
        node.containers = [ours(rank, run="run-0", spec="sha256:old")]
    scene.head.refusal = "no such flag"
    (_, error), *_ = make(scene, run="run-2", replaces="run-0").failed
    assert "brought back" not in error.details
    assert not any(node.containers for node in scene.nodes)


def test_an_interrupted_attempt_is_recorded(scene: Scene) -> None:
    launch = scene.launch()
    links: Any = {}

    def carry(_plan: Plan) -> ApplyReport:
        raise KeyboardInterrupt

    start = Starting([], links, launch)
    with pytest.raises(KeyboardInterrupt):
        attempt.make(scene.deployment, start, "start", Plan(()), carry)
    assert endings(scene) == [("run-2", "interrupted")]
    assert gather(scene.cluster.head).containers == ()
