from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from sparkserve import engine, lifecycle, operations, records
from sparkserve.cluster import Cluster, is_locked, pair_lock
from sparkserve.engine_stop import Stopping
from sparkserve.errors import SparkserveError
from sparkserve.lifecycle import Session
from sparkserve.lock import write_lock
from sparkserve.operations import Eyes
from sparkserve.plan import Change
from sparkserve.status import Evidence, Verdict
from sparkserve.status_look import Question, Status
from tests.component.docker_node import DockerNode
from tests.fakes import make_cluster
from tests.unit.deployments import make_lock

ENVIRONMENT = {"SPARKSERVE_WORKER": "spark@10.0.0.2"}


def make_session(tmp_path: Path, recipe: str | None = None, **environment: str) -> Session:
    environment |= {**ENVIRONMENT, "XDG_STATE_HOME": str(tmp_path / "state")}
    nobody = cast("Any", None)
    return lifecycle.open_session("status", tmp_path / ".env", environment, {"recipe": recipe}, nobody)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("")
    monkeypatch.chdir(tmp_path)


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
    assert not is_locked(tmp_path / "nosuch")
    with pair_lock(tmp_path, "start"):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_stop_is_the_owners_word_even_if_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(tmp_path)
    records.keep_wanted(session.state, serving=True, recipe="smoke")
    Scene(monkeypatch)
    for dry_run in (True, False):
        assert operations.stop(session, force=False, dry_run=dry_run).plan.is_empty
        assert records.read_wanted(session.state).serving is dry_run


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
