from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sparkserve import watch as watching
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_NOT_READY, Failures, SparkserveError
from sparkserve.plan import Applied, ApplyReport, Change
from sparkserve.records import Wanted
from sparkserve.status import Evidence, Verdict
from sparkserve.status_look import Status
from sparkserve.watch import Event, Journal, Watch


@dataclass
class Scene:
    """A pair as a script of states, the owner's word, and what restarts do."""

    path: Path
    states: list[str] = field(default_factory=list)
    wanted: Wanted = field(default_factory=lambda: Wanted(serving=True, since=1.0))
    restarts: list[Any] = field(default_factory=list)
    per_hour: int = 3
    busy: bool = False
    asked: list[bool] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    watch: Watch | None = None

    def look(self, ask_token: bool) -> Status:
        self.asked.append(ask_token)
        state: Any = self.states.pop(0)
        if state == "no connection":
            raise SparkserveError("ssh_timeout", "no answer", node="worker", exit_code=EXIT_COULD_NOT_LOOK)
        return Status(Verdict(state, (f"it is {state}",)), {}, {}, Evidence())

    def restart(self) -> str:
        result = self.restarts.pop(0)
        if isinstance(result, Exception):
            raise result
        return str(result)

    def run(self, *states: str) -> list[str]:
        self.states += states
        self.watch = self.watch or self.make()
        for _ in states:
            self.events += self.watch.step()
        return [event.kind for event in self.events]

    def make(self) -> Watch:
        journal = Journal(self.path)
        return Watch(self.look, self.restart, lambda: self.wanted, lambda: self.busy, journal, self.per_hour)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(watching, "_REST_SECONDS", 0.0)
    return Scene(tmp_path / "state" / "events.jsonl")


def test_a_state_is_told_once(scene: Scene) -> None:
    assert scene.run("running", "running", "starting", "running", "unknown", "unknown") == [
        "running", "starting", "running", "unknown",
    ]  # fmt: skip


def test_one_bad_look_is_named_and_not_acted_on(scene: Scene) -> None:
    assert scene.run("running", "degraded", "running") == ["running", "degraded", "running"]


def test_two_bad_looks_restart_the_pair_once(scene: Scene) -> None:
    scene.restarts = ["answered"]
    kinds = scene.run("running", "degraded", "degraded", "running", "running")
    assert kinds == ["running", "degraded", "restarting", "restarted", "running"]
    assert scene.events[3].text == "answered"


@pytest.mark.parametrize("state", ["unknown", "no connection"])
def test_what_could_not_be_seen_is_no_evidence(scene: Scene, state: str) -> None:
    assert scene.run("running", "degraded", state, "degraded", "running") == [
        "running", "degraded", "unknown", "degraded", "running",
    ]  # fmt: skip


def test_a_dry_run_tells_when_it_would_restart_and_does_not(scene: Scene) -> None:
    scene.watch = scene.make()
    scene.watch.restart = None
    scene.watch.journal = Journal(Path(os.devnull))
    told = scene.run("running", "degraded", "degraded", "degraded", "running", "degraded", "degraded")
    assert told == ["running", "degraded", "waiting", "running", "degraded", "waiting"]
    assert "would be restarted now" in scene.events[2].text
    assert not scene.path.exists()


def test_a_pair_that_its_owner_stopped_stays_stopped(scene: Scene) -> None:
    scene.wanted = Wanted(serving=False)
    assert scene.run("stopped", "stopped", "stopped") == ["stopped"]


def test_nothing_is_done_while_another_command_is_at_work(scene: Scene) -> None:
    scene.busy = True
    assert scene.run("degraded", "stopped", "degraded") == ["degraded", "stopped", "degraded"]


def test_after_so_many_restarts_it_stays_down_until_the_owner_starts_it(scene: Scene) -> None:
    scene.per_hour, scene.restarts = 2, ["1", "2", "3"]
    kinds = scene.run(*["stopped"] * 8)
    assert kinds.count("restarted") == 2
    assert kinds[-1] == "gave_up"
    assert "2 restarts within an hour" in scene.events[-1].text
    scene.wanted = Wanted(serving=True, since=time.time())
    assert scene.run("stopped")[-2:] == ["restarting", "restarted"]


def test_it_stays_down_though_the_hour_is_over_and_the_watch_another(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.per_hour, scene.restarts = 1, ["1"]
    assert scene.run(*["stopped"] * 4)[-1] == "gave_up"
    monkeypatch.setattr(watching, "_HOUR", 0.0)
    scene.run("stopped", "stopped")
    scene.watch = None  # as after a reboot
    kinds = scene.run("stopped", "stopped")
    assert (kinds.count("restarting"), kinds.count("gave_up")) == (1, 1)


def test_restarts_of_an_earlier_watch_count(scene: Scene) -> None:
    scene.per_hour = 1
    Journal(scene.path).add("restarted", "before")
    assert scene.run("stopped", "stopped") == ["stopped", "gave_up"]


def test_an_old_restart_does_not_count(scene: Scene) -> None:
    scene.per_hour, scene.restarts = 1, ["now"]
    scene.path.parent.mkdir()
    scene.path.write_text(json.dumps({"at": time.time() - 3700, "kind": "restarted", "text": ""}) + "\n")
    assert scene.run("stopped", "stopped")[-1] == "restarted"


def test_a_failed_restart_counts_and_one_that_could_not_begin_does_not(scene: Scene) -> None:
    link_down = SparkserveError("check_link_address", "no link", exit_code=EXIT_NOT_READY)
    scene.per_hour = 1
    scene.restarts = [link_down, link_down, SparkserveError("rank_ended", "rank 1 ended")]
    kinds = scene.run(*["stopped"] * 6)
    assert kinds == ["stopped", "restarting", "waiting", "restart_failed", "gave_up"]
    assert scene.events[3].text == "rank 1 ended"


def node_silent(*resources: str) -> SparkserveError:
    """Make the error of a start that lost a node after these of its changes were done."""
    done = [Change("head", "start", name, "absent", "running", lambda _work: "") for name in resources]
    failures = Failures([SparkserveError("node_silent", "no word for 30 s", exit_code=EXIT_COULD_NOT_LOOK)])
    failures.report = ApplyReport([Applied(change, "", 0.0, 1.0) for change in done])
    return failures


@pytest.mark.parametrize(
    ("resources", "kinds"),
    [
        (("old pair", "sparkserve-rank1"), ["restart_failed", "gave_up"]),
        (("old pair",), ["waiting"]),
        ((), ["waiting"]),
    ],
    ids=["a rank was made", "only the old pair went", "nothing was done"],
)
def test_a_restart_counts_once_a_rank_was_made_however_it_ended(
    scene: Scene, resources: tuple[str, ...], kinds: list[str]
) -> None:
    scene.per_hour = 1
    scene.restarts = [node_silent(*resources) for _ in range(4)]
    assert scene.run(*["stopped"] * 5) == ["stopped", "restarting", *kinds]


def test_a_wait_that_is_over_is_forgotten(scene: Scene) -> None:
    scene.restarts = [node_silent(), node_silent()]
    kinds = scene.run("stopped", "stopped", "running", "stopped", "stopped")
    assert kinds == ["stopped", "restarting", "waiting", "running", "stopped", "restarting", "waiting"]


def test_a_disk_that_takes_nothing_ends_no_watch_and_loosens_no_rule(scene: Scene) -> None:
    scene.path.parent.write_text("a file in the way")
    full = OSError(errno.ENOSPC, "No space left on device")
    scene.per_hour, scene.restarts = 1, [full, "answered"]
    kinds = scene.run(*["stopped"] * 7)
    assert kinds == ["stopped", "restarting", "waiting", "restarted", "stopped", "gave_up"]
    assert "No space left on device" in scene.events[2].text


def test_a_failed_restart_is_not_tried_again_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_REST_SECONDS", 60.0)
    scene.restarts = [SparkserveError("rank_ended", "rank 1 ended")]
    assert scene.run(*["stopped"] * 5) == ["stopped", "restarting", "restart_failed"]


def test_an_idle_engine_is_asked_for_a_token_rarely_and_a_suspicious_one_at_once(scene: Scene) -> None:
    scene.wanted = Wanted(serving=False)
    scene.run("running", "running", "running", "stalled", "stalled", "running", "running")
    assert scene.asked == [True, False, False, False, True, True, False]


def test_a_stall_that_only_grows_longer_is_one_event(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.wanted = Wanted(serving=False)
    reasons = iter([("no counter moved for 900 s",), ("no counter moved for 901 s",), ("rank 1 ended",)])
    monkeypatch.setattr(scene, "look", lambda _ask: Status(Verdict("stalled", next(reasons)), {}, {}, Evidence()))
    assert scene.run("-", "-", "-") == ["stalled", "stalled"]


def test_the_loop_looks_again_at_once_after_a_first_bad_look(scene: Scene) -> None:
    scene.restarts, scene.states = ["answered"], ["degraded", "degraded", "running"]
    begun = time.monotonic()
    kinds = []
    for event in scene.make().run():
        kinds.append(event.kind)
        if event.kind == "restarted":
            break
    assert kinds == ["degraded", "restarting", "restarted"]
    assert time.monotonic() - begun < watching._LOOK_SECONDS


# -- the journal ------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_owners_command_gets_the_event_and_its_failure_is_told(tmp_path: Path) -> None:
    told = tmp_path / "told"
    script = f"import sys; open({str(told)!r}, 'w').write(sys.stdin.read()); sys.exit(3)"
    journal = Journal(tmp_path / "events.jsonl", [sys.executable, "-c", script])
    journal.add("degraded", "rank 1 ended")
    wait_until(lambda: journal.read()[-1].kind == "call_failed" or bool(list(journal.reap())))
    failures = journal.read()[1:]
    assert json.loads(told.read_text())["kind"] == "degraded"
    assert (failures[0].kind, "exit code 3" in failures[0].text) == ("call_failed", True)
    assert list(journal.reap()) == []


def test_a_command_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl", ["/no/such/command"])
    journal.add("degraded", "rank 1 ended")
    assert [event.kind for event in journal.read()] == ["degraded", "call_failed"]


def test_the_journal_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_EVENTS_KEPT", 5)
    journal = Journal(tmp_path / "events.jsonl")
    for number in range(30):
        journal.add("running", str(number))
    kept = [event.text for event in journal.read()]
    assert kept[-1] == "29"
    assert 5 <= len(kept) <= 10


def test_half_a_line_of_a_killed_watch_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.add("running", "a")
    with journal.path.open("a") as file:
        file.write('{"at": 1.0, "ki')
    journal.add("running", "b")
    journal.add("running", "c")
    assert [event.text for event in journal.read()] == ["a", "c"]
