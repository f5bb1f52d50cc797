from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkserve import attempt, blueprint, engine, lifecycle, link, lock, operations, planning, preflight, records
from sparkserve.blueprint import Place, Seen
from sparkserve.checks import Check
from sparkserve.cluster import ROLES, Cluster, Role, lock_holder, pair_lock
from sparkserve.container import build_spec
from sparkserve.endpoint import Endpoint
from sparkserve.engine_facts import LOOK_SECONDS, ContainerFacts, Facts, Memory
from sparkserve.engine_stop import Stopping
from sparkserve.engine_watch import Launch
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_NOT_READY, EXIT_USAGE, SparkserveError, flatten
from sparkserve.lifecycle import Outcome, Session
from sparkserve.lock import LockedImage, write_lock
from sparkserve.operations import Eyes
from sparkserve.output import Mode, Output
from sparkserve.plan import ApplyReport, Change, Interrupted, Plan
from sparkserve.planning import Starting
from sparkserve.preflight import judge
from sparkserve.records import Pair, Record, save_record
from sparkserve.status import Evidence, Verdict
from sparkserve.status_look import Question, Status
from tests.component.docker_node import DockerNode
from tests.fakes import FakeSession, make_cluster
from tests.unit.cases import wait_for
from tests.unit.deployments import FILES, IMAGE, LINKS, make_deployment, make_lock
from tests.unit.facts import make_subject, make_system

NEWER = LockedImage(base="nvcr.io/nvidia/pytorch@sha256:" + "f" * 64)
ENVIRONMENT = {"SPARKSERVE_WORKER": "spark@10.0.0.2"}


def make_session(tmp_path: Path, recipe: str | None = None, **environment: str) -> Session:
    environment |= {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}
    nobody = cast("Any", None)
    return lifecycle.open_session("status", tmp_path / ".env", environment, {"recipe": recipe}, nobody)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("")
    monkeypatch.chdir(tmp_path)


def test_parameters_that_cannot_be_are_told_once(tmp_path: Path) -> None:
    session = make_session(tmp_path, SPARKSERVE_CONTEXT="99999999")
    with pytest.raises(SparkserveError, match="SPARKSERVE_CONTEXT") as caught:
        lifecycle.run_steps(session, ("start",), dry_run=True)
    assert [error.node for error in flatten(caught.value)] == [""]


def test_a_start_shows_of_its_checks_just_those_that_are_not_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = replace(make_session(tmp_path), voice=Output(Mode.HUMAN), skip_checks=("clock",))
    without_swap = {**make_system().memory, "SwapTotal": 0}
    found = judge(make_subject(system={"worker": {"memory": without_swap, "clock": (7.5, 0.0)}}))
    monkeypatch.setattr(preflight, "preflight", lambda *_: found)
    deployment = cast("Any", SimpleNamespace(cluster=make_cluster(), recipe=session.recipe))
    lifecycle.prepare(session, deployment, Plan(()), None)
    said = capsys.readouterr()
    first, second = said.err.splitlines()
    assert first.startswith("warning: check swap, worker: no swap; better: swap that is there")
    assert second.startswith("warning: check clock (skipped), both nodes: the worker's clock is 7.500 s ahead")
    assert (len(found) > 50, said.out) == (True, "")


# -- which recipe -----------------------------------------------------------------------------------------------------


def test_looks_follow_the_recipe_that_was_started_last(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    assert operations.following(session) is session
    records.keep_wanted(session.state, serving=True, recipe="smoke")
    assert operations.following(session).recipe.name == "smoke"
    named = make_session(tmp_path, "vllm-1017")
    assert operations.following(named) is named


def test_a_start_of_another_recipe_takes_every_step_but_the_tuning(tmp_path: Path) -> None:
    assert operations.start_steps(make_session(tmp_path, "smoke")) == ("start",)
    records.keep_wanted(make_session(tmp_path).state, serving=True, recipe="tensorfold-1017")
    steps = operations.start_steps(make_session(tmp_path, "smoke"))
    assert steps == tuple(step for step in lifecycle.STEPS if step != "tune")
    assert operations.start_steps(make_session(tmp_path)) == ("start",)
    assert operations.start_steps(make_session(tmp_path, "tensorfold-1017")) == ("start",)


def test_a_recipe_for_one_run_has_its_own_lock_where_the_lock_is_anothers(tmp_path: Path) -> None:
    main = tmp_path / "sparkserve.lock.json"
    assert make_session(tmp_path, "smoke").lock_file == main
    write_lock(main, make_lock(make_session(tmp_path).recipe))
    assert make_session(tmp_path).lock_file == main
    assert make_session(tmp_path, "tensorfold-1017").lock_file == main
    assert make_session(tmp_path, "smoke").lock_file == tmp_path / "sparkserve.smoke.lock.json"


def test_a_lock_is_not_written_under_a_command_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(tmp_path)
    found = make_lock(session.recipe)
    monkeypatch.setattr(lifecycle, "resolve_lock", lambda *_, **__: (found, True))
    with pair_lock(session.state, "up"), pytest.raises(SparkserveError, match="`sparkserve up`"):
        lifecycle.lock_sources(session, update=True, dry_run=False)
    assert not session.lock_file.exists()
    assert lifecycle.lock_sources(session, update=True, dry_run=False).written
    assert session.lock_file.exists()


# -- a start ----------------------------------------------------------------------------------------------------------


def made_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *refusals: SparkserveError) -> Session:
    """A session whose pair is planned, with what keeps its start from being made."""
    session = make_session(tmp_path)
    session.voice, session.command = Output(Mode.QUIET), "start"
    specs = {role: build_spec(make_deployment(), rank, LINKS, FILES, IMAGE) for rank, role in enumerate(LINKS)}
    launch = Launch(specs, "run-2", Endpoint("http://127.0.0.1:8888", "flash"), session.state / "runs")
    build = Change("head", "build", "image", "absent", "built", lambda _: "")
    create = Change("head", "start", "rank0", "absent", "running", lambda _: "", (build.key,) * bool(refusals), "start")
    planned = Starting([create], {}, launch, refusals=refusals)
    seen = Seen(seconds=0, nodes={})
    for module, name, answer in (
        (planning, "plan_preparation", [build] * bool(refusals)),
        (planning, "plan_start", planned),
        (blueprint, "see", seen),
    ):
        monkeypatch.setattr(module, name, lambda *_, _answer=answer, **__: _answer)
    return session


def test_all_that_refuses_a_start_is_told_at_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = SparkserveError("name_taken", "has our name", node="head", exit_code=EXIT_NOT_READY)
    session = made_start(monkeypatch, tmp_path, taken)
    held = Check("port", "worker", "fail", "port 8888: held", "a free port")
    monkeypatch.setattr(preflight, "preflight", lambda *_: [held])
    with pytest.raises(SparkserveError) as caught:
        lifecycle.run_steps(session, ("start",), opened=make_deployment())
    assert [error.code for error in flatten(caught.value)] == ["name_taken", "not_prepared", "check_port"]
    assert caught.value.exit_code == EXIT_NOT_READY
    (record,) = records.read_records(session.state / "runs")
    assert (record.command, record.ending) == ("start", "failed")
    assert "has our name; 1 earlier changes are still to be made; worker: port 8888: held" in record.error
    with pytest.raises(SparkserveError) as shown:
        lifecycle.run_steps(session, ("start",), opened=make_deployment(), dry_run=True)
    assert [error.code for error in flatten(shown.value)] == ["name_taken", "not_prepared"]
    assert len(records.read_records(session.state / "runs")) == 1, "one that is only shown is none"


def test_a_start_that_answered_is_one_where_its_wish_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = made_start(monkeypatch, tmp_path)
    monkeypatch.setattr(preflight, "preflight", lambda *_: [])
    (session.state / "wanted.json").mkdir(parents=True)
    assert lifecycle.run_steps(session, ("start",), opened=make_deployment()).report.applied
    assert "the head's state cannot be written" in capsys.readouterr().err


def test_a_live_plan_is_drawn_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(tmp_path)
    session.voice = Output(Mode.QUIET)
    nodes: dict[Role, Place] = {role: Place(home="/home/spark") for role in ROLES}
    monkeypatch.setattr(lifecycle, "connect", lambda _: contextlib.nullcontext(make_cluster()))
    monkeypatch.setattr(link, "gather", lambda _: None)
    monkeypatch.setattr(blueprint, "see", lambda *_: Seen(seconds=0, nodes=nodes))
    session.facts_file.mkdir(parents=True)
    assert set(lifecycle.draw(session, None, live=True).specs) == {"head", "worker"}


# -- eyes -------------------------------------------------------------------------------------------------------------


class Scene:
    """Connections that are counted, and looks that answer from a script."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = self.closed = 0
        self.questions: list[Question] = []
        self.unseen: list[bool] = []
        monkeypatch.setattr(operations, "connect", self.connect)
        monkeypatch.setattr("sparkserve.status_look.look", self.look)

    @contextlib.contextmanager
    def connect(self, _settings: object, *, lenient: bool) -> Iterator[Cluster]:
        assert lenient
        self.opened += 1
        yield make_cluster(head=DockerNode().session, worker=DockerNode().session)
        self.closed += 1

    def look(self, question: Question) -> Status:
        self.questions.append(question)
        gone = SparkserveError("connection_lost", "gone", node="worker")
        unseen: Any = {"worker": gone} if self.unseen.pop(0) else {}
        return Status(Verdict("unknown" if unseen else "running", ()), {}, unseen, Evidence())


def test_glances_share_a_connection_until_it_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.unseen = [False, False, True, False]
    with Eyes(make_session(tmp_path)) as eyes:
        states = [eyes.glance(ask_token).verdict.state for ask_token in (True, False, False, False)]
        assert (scene.opened, scene.closed) == (2, 1)
    assert scene.closed == 2
    assert states == ["running", "running", "unknown", "running"]
    assert [question.ask_token for question in scene.questions] == [True, False, False, False]
    assert all(question.wanted == {} and question.patience < 1 for question in scene.questions)


def test_a_recipe_that_is_started_meanwhile_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.unseen = [False] * 3
    session = make_session(tmp_path)
    with Eyes(session) as eyes:
        eyes.glance(ask_token=False)
        records.keep_wanted(session.state, serving=True, recipe="smoke")
        eyes.glance(ask_token=False)
        records.keep_wanted(session.state, serving=False)
        eyes.glance(ask_token=False)
    assert [question.recipe.name for question in scene.questions] == ["tensorfold-1017", "smoke", "smoke"]
    assert scene.questions[0].endpoint.model != scene.questions[1].endpoint.model
    assert scene.opened == 1


# -- the lock of the pair ---------------------------------------------------------------------------------------------


def test_a_watch_sees_that_another_command_is_at_work(tmp_path: Path) -> None:
    assert lock_holder(tmp_path / "nosuch") == ""
    with pair_lock(tmp_path, "start"):
        assert "`sparkserve start`" in lock_holder(tmp_path)
    assert lock_holder(tmp_path) == ""


def test_a_stop_is_the_owners_word_even_if_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(tmp_path)
    records.keep_wanted(session.state, serving=True, recipe="smoke")
    Scene(monkeypatch)
    for dry_run in (True, False):
        assert operations.stop(session, force=False, dry_run=dry_run).plan.is_empty
        assert records.read_wanted(session.state).serving is dry_run


def test_a_stop_needs_no_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(tmp_path)
    (tmp_path / "state").write_text("a file where our directory should be")
    warned: list[str] = []
    session.voice = cast("Any", SimpleNamespace(warn=warned.append))
    Scene(monkeypatch)
    assert operations.stop(session, force=False, dry_run=False).plan.is_empty
    assert all("going on all the same" in text for text in warned)
    assert warned


def test_a_refused_stop_leaves_the_owners_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(tmp_path)
    records.keep_wanted(session.state, serving=True, recipe="smoke")
    before = records.read_wanted(session.state)
    Scene(monkeypatch)
    with pair_lock(session.state, "start"), pytest.raises(SparkserveError, match="sparkserve start"):
        operations.stop(session, force=False, dry_run=False)
    assert records.read_wanted(session.state) == before


def test_a_watch_that_restarts_the_pair_gives_way_to_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(tmp_path)
    session.command = "watch"
    records.keep_wanted(session.state, serving=True)
    Scene(monkeypatch)
    begun = threading.Event()

    def restart(run: Session, _last: object) -> Outcome:
        with pair_lock(session.state, "watch"):
            begun.set()
            wait_for(lambda: not run.is_wanted(), "the restart is told that nobody wants it")
        raise Interrupted(ApplyReport())

    def watch(**given: Any) -> Any:
        return SimpleNamespace(run=lambda: iter([given["restart"]]))

    monkeypatch.setattr(lifecycle, "restart", restart)
    monkeypatch.setattr(operations, "Watch", watch)
    watching = cast("Any", operations.watch(session))
    restart_of_watch = next(watching)
    with ThreadPoolExecutor(1) as aside:
        ended = aside.submit(restart_of_watch)
        assert begun.wait(60)
        assert operations.stop(make_session(tmp_path), force=False, dry_run=False).plan.is_empty
        with pytest.raises(SparkserveError, match="was stopped while it was restarted"):
            ended.result(60)
    assert not records.read_wanted(session.state).serving


@pytest.mark.parametrize(
    ("code", "exit_code", "is_new_lock", "comes_back"),
    [
        ("not_prepared", EXIT_NOT_READY, True, True),
        ("not_prepared", EXIT_NOT_READY, False, False),
        ("settings_invalid", EXIT_USAGE, False, True),
        ("check_link_address", EXIT_NOT_READY, True, False),
    ],
)
def test_a_restart_takes_the_recorded_pair_where_what_is_new_was_not_made_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, exit_code: int, *, is_new_lock: bool, comes_back: bool
) -> None:
    session = make_session(tmp_path)
    session.voice = Output(Mode.QUIET)
    session.skip_checks = ("swap",)
    old = make_lock(session.recipe)
    known = old.model_copy(update={"image": NEWER}) if is_new_lock else old
    pair = Pair({}, session.recipe, old, "http://old", "old")

    def refuse(*_: object) -> Outcome:
        raise SparkserveError(code, "not now", exit_code=exit_code)

    made: list[tuple[Any, ...]] = []

    def plan_recorded(*given: Any) -> Starting:
        made.append(given)
        return Starting([], {}, cast("Any", None))

    monkeypatch.setattr(lock, "read_lock", lambda *_: known)
    monkeypatch.setattr(lifecycle, "run_steps", refuse)
    monkeypatch.setattr(lifecycle, "prepare", lambda *_: None)
    monkeypatch.setattr(lifecycle, "connect", lambda _: contextlib.nullcontext(make_cluster()))
    monkeypatch.setattr(planning, "plan_recorded", plan_recorded)
    monkeypatch.setattr(attempt, "make", lambda *_: ApplyReport())
    if comes_back:
        lifecycle.restart(session, pair)
    else:
        with pytest.raises(SparkserveError, match="not now"):
            lifecycle.restart(session, pair)
    assert [(one[0].lock, one[1], one[4]) for one in made] == [(old, pair, ("swap",))] * comes_back
    with pytest.raises(SparkserveError, match="not now"):
        lifecycle.restart(session, None)


def test_a_planned_start_tells_a_stranger_with_our_name_from_the_preflight_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = ContainerFacts("s1", "sparkserve-rank0", "running", image="web")
    facts: dict[Role, Facts] = {"head": Facts(0.0, Memory(0, 0, 0), foreign=(stranger,))}
    seen = Status(Verdict("stopped", ()), facts, {}, Evidence())
    for name, answer in (("build_specs", {}), ("look", seen), ("is_warm", True)):
        monkeypatch.setattr(planning, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(link, "gather", lambda _: None)
    monkeypatch.setattr(engine, "plan", lambda *_: [])
    (refusal,) = planning.plan_start(make_deployment(), tmp_path / "runs", []).refusals
    assert (refusal.code, refusal.node) == ("name_taken", "head")


def test_a_start_that_cannot_see_whether_the_pair_answers_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = Status(Verdict("unknown", ("no token within 5 s",)), {}, {}, Evidence())
    for name, answer in (("build_specs", {}), ("look", unseen), ("is_warm", True)):
        monkeypatch.setattr(planning, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(link, "gather", lambda _: None)
    monkeypatch.setattr(engine, "plan", lambda *_: [])
    with pytest.raises(SparkserveError, match="whether it answers cannot be seen: no token within 5 s") as caught:
        planning.plan_start(make_deployment(), tmp_path / "runs", [])
    assert caught.value.exit_code == EXIT_COULD_NOT_LOOK


def test_what_holds_no_lock_is_not_under_way(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    for run, ending in (("a", "under way"), ("b", "answered"), ("c", "under way")):
        save_record(session.state / "runs", Record(run, "start", "", 0.0, {}, {}, cast("Any", ending)))
    with pair_lock(session.state, "start"):
        assert [one.ending for one in operations.history(session)] == ["under way", "answered", "killed"]
    assert [one.ending for one in operations.history(session)] == ["killed", "answered", "killed"]


def test_a_look_waits_for_no_silent_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def silent(timeout: float = 60.0, **_fields: object) -> Any:
        waited.append(timeout)
        raise SparkserveError("session_timeout", "no answer", node="worker", exit_code=EXIT_COULD_NOT_LOOK)

    worker = FakeSession(dict.fromkeys(("facts", "docker_logs"), silent))
    monkeypatch.setattr(
        operations, "connect", lambda *_a, **_k: contextlib.nullcontext(make_cluster(head=worker, worker=worker))
    )
    with Eyes(make_session(tmp_path)) as eyes:
        assert eyes.view().status.verdict.state == "unknown"
    assert max(waited) <= LOOK_SECONDS


def test_a_stop_masks_the_api_key_too_and_needs_no_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_text("sk-very-secret")
    key.chmod(0o600)
    session = make_session(tmp_path, SPARKSERVE_API_KEY_FILE=str(key))
    Scene(monkeypatch)
    masked: list[list[str]] = []

    def plan_stop(_cluster: object, _facts: object, stopping: Stopping) -> list[Change]:
        masked.append([secret.get_secret_value() for secret in stopping.secrets if secret])
        return []

    monkeypatch.setattr(engine, "plan_stop", plan_stop)
    operations.stop(session, force=False, dry_run=True)
    key.unlink()
    operations.stop(session, force=False, dry_run=True)
    assert masked == [["sk-very-secret"], []]
