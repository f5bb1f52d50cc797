from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from sparkserve.errors import EXIT_NOT_READY, SparkserveError, flatten
from sparkserve.plan import Applied, Change, Plan, Work, apply, key_of, select
from tests.fakes import RecordingReporter
from tests.unit.cases import wait_for

Action = Callable[[Work], str]


def done(_work: Work) -> str:
    return "seen"


def fails(code: str, node: str = "") -> Action:
    def action(_work: Work) -> str:
        raise SparkserveError(code, f"{code} went wrong", node=node)

    return action


def change(name: str, *needs: str, action: Action = done, lane: str = "", step: str = "s") -> Change:
    wanted = tuple(need if "/" in need else key_of("head", "s", need) for need in needs)
    return Change("head", step, name, "absent", "present", action, needs=wanted, lane=lane)


def names(keys: list[str]) -> list[str]:
    return [key.rpartition("/")[2] for key in keys]


class Gate:
    """Holds actions until as many are inside as the test expects."""

    def __init__(self, expected: int) -> None:
        self._barrier = threading.Barrier(expected)
        self._lock = threading.Lock()
        self.inside = 0
        self.most = 0

    def meet(self, _work: Work) -> str:
        self._barrier.wait(60)
        return "met"

    def count(self, _work: Work) -> str:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self._barrier.wait(60)
        with self._lock:
            self.inside -= 1
        return "counted"


# -- order ------------------------------------------------------------------------------------------------------------


def test_an_empty_plan_does_nothing() -> None:
    reporter = RecordingReporter()
    report = apply(Plan(()), reporter)
    assert (Plan(()).is_empty, report.applied, reporter.events) == (True, [], [])


def test_what_is_needed_comes_first_whatever_the_order_of_the_plan() -> None:
    plan = Plan((change("c", "b"), change("b", "a"), change("a"), change("d", "a", "c")))
    reporter = RecordingReporter()
    report = apply(plan, reporter)
    assert names([item.change.key for item in report.applied]) == ["a", "b", "c", "d"]
    assert names(reporter.keys("started")) == ["a", "b", "c", "d"]
    assert next(event for event in reporter.events if event[0] == "finished") == ("finished", "head/s/a", "seen")


def test_a_need_that_is_in_no_plan_holds_already() -> None:
    assert len(apply(Plan((change("a", "worker/sync/x"),)), RecordingReporter()).applied) == 1


def test_changes_run_side_by_side() -> None:
    gate = Gate(4)
    plan = Plan(tuple(change(name, action=gate.meet) for name in "abcd"))
    assert len(apply(plan, RecordingReporter()).applied) == 4


def test_a_change_begins_as_soon_as_its_own_need_is_met() -> None:
    later = threading.Event()

    def waits(_work: Work) -> str:
        if not later.wait(60):
            raise SparkserveError("slow", "the copy never began")
        return "waited"

    def releases(_work: Work) -> str:
        later.set()
        return "copied"

    plan = Plan((change("slow file", action=waits), change("file"), change("copy", "file", action=releases)))
    assert len(apply(plan, RecordingReporter()).applied) == 3


@pytest.mark.parametrize("width", [1, 2, 3])
def test_no_more_of_one_kind_than_its_width(width: int) -> None:
    gate = Gate(width)  # so many are inside at once, or nobody comes out
    plan = Plan(tuple(change(str(n), action=gate.count, lane="download") for n in range(6)))
    apply(plan, RecordingReporter(), {"download": width})
    assert gate.most == width


def test_a_lane_is_as_wide_on_each_node() -> None:
    gate = Gate(2)
    changes = [replace(change("a", action=gate.meet, lane="one"), node=node) for node in ("head", "worker")]
    assert len(apply(Plan(tuple(changes)), RecordingReporter(), {"one": 1}).applied) == 2


def test_a_full_lane_does_not_hold_another() -> None:
    gate = Gate(2)
    plan = Plan((change("a", action=gate.meet, lane="one"), change("b", action=gate.meet, lane="two")))
    assert len(apply(plan, RecordingReporter(), {"one": 1, "two": 1}).applied) == 2


def test_progress_and_notes_arrive() -> None:
    def tells(work: Work) -> str:
        work.note("half")
        work.progress(1, 2)
        work.check()
        return "told"

    reporter = RecordingReporter()
    (applied,) = apply(Plan((change("a", action=tells),)), reporter).applied
    assert reporter.events[1:3] == [("note", "head/s/a", "half"), ("progress", "head/s/a", 1, 2)]
    assert applied.proof == "told"
    assert applied.ended >= applied.begun


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_stops_only_what_needs_it() -> None:
    plan = Plan((change("a", action=fails("bad")), change("b", "a"), change("c", "b"), change("d"), change("e", "d")))
    reporter = RecordingReporter()
    report = apply(plan, reporter)
    assert sorted(names([item.change.key for item in report.applied])) == ["d", "e"]
    assert names([item.key for item, _ in report.failed]) == ["a"]
    assert sorted(names([item.key for item in report.not_reached])) == ["b", "c"]
    assert reporter.keys("failed") == ["head/s/a"]
    assert "head/s/b" not in reporter.keys("started")


def test_both_failures_are_told_with_their_nodes() -> None:
    plan = Plan((change("a", action=fails("one", "worker")), change("b", action=fails("two"))))
    with pytest.raises(SparkserveError) as caught:
        apply(plan, RecordingReporter()).raise_failures()
    assert [(error.code, error.node) for error in flatten(caught.value)] == [("one", "worker"), ("two", "head")]


def test_failures_are_told_in_the_order_of_the_plan_and_not_of_the_clock() -> None:
    reporter = RecordingReporter()

    def late(_work: Work) -> str:
        wait_for(lambda: reporter.keys("failed") == ["head/s/b"], "the second change failed first")
        raise SparkserveError("late", "went wrong", exit_code=EXIT_NOT_READY)

    plan = Plan((change("a", action=late), change("b", action=fails("early"))))
    with pytest.raises(SparkserveError) as caught:
        apply(plan, reporter).raise_failures()
    assert [error.code for error in flatten(caught.value)] == ["late", "early"]
    assert caught.value.exit_code == EXIT_NOT_READY


def test_the_same_cause_is_told_once() -> None:
    plan = Plan(tuple(change(str(n), action=fails("bad")) for n in range(3)))
    report = apply(plan, RecordingReporter())
    assert len(report.failed) == 3
    with pytest.raises(SparkserveError) as caught:
        report.raise_failures()
    assert len(flatten(caught.value)) == 1


def test_a_report_without_failures_raises_nothing() -> None:
    apply(Plan((change("a"),)), RecordingReporter()).raise_failures()


def test_a_kind_that_keeps_failing_is_given_up_and_others_go_on() -> None:
    broken = [change(f"f{n}", action=fails("bad"), lane="download") for n in range(6)]
    plan = Plan((*broken, change("other", lane="image"), change("plain")))
    report = apply(plan, RecordingReporter(), {"download": 1})
    assert len(report.failed) == 2
    assert len(report.not_reached) == 4
    assert sorted(names([item.change.key for item in report.applied])) == ["other", "plain"]


def test_changes_without_a_kind_have_nothing_in_common() -> None:
    plan = Plan(
        (*[change(f"f{n}", action=fails("bad")) for n in range(3)], change("g"), change("h", "g"), change("i", "h"))
    )
    report = apply(plan, RecordingReporter())
    assert len(report.failed) == 3
    assert len(report.applied) == 3


# -- bugs -------------------------------------------------------------------------------------------------------------


def test_a_bug_in_an_action_is_raised_and_stops_the_rest() -> None:
    def bug(_work: Work) -> str:
        raise ZeroDivisionError

    begun: list[str] = []

    def polite(work: Work) -> str:
        begun.append("polite")
        wait_for(lambda: cancelled(work), "the bug reaches the others")
        work.check()
        return "never"

    plan = Plan((change("polite", action=polite), change("bug", action=bug), change("later", "polite")))
    reporter = RecordingReporter()
    with pytest.raises(ZeroDivisionError):
        apply(plan, reporter)
    assert begun == ["polite"]
    assert "head/s/later" not in reporter.keys("started")


def cancelled(work: Work) -> bool:
    try:
        work.check()
    except BaseException:  # noqa: BLE001 - the test only asks whether
        return True
    return False


@pytest.mark.parametrize("event", ["started", "finished", "failed"])
def test_a_bug_in_a_reporter_is_raised(event: str) -> None:
    class Broken(RecordingReporter):
        def _break(self, *_anything: object) -> None:
            raise BrokenPipeError(event)

    reporter = Broken()
    setattr(reporter, event, reporter._break)
    action = fails("bad") if event == "failed" else done
    with pytest.raises(BrokenPipeError, match=event):
        apply(Plan((change("a", action=action), change("b", "a"))), reporter)


def test_changes_that_need_each_other_are_refused_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="cycle"):
        Plan((change("free"), change("a", "b"), change("b", "c"), change("c", "a")))
    with pytest.raises(ValueError, match="cycle"):
        Plan((change("a", "a"),))


def test_a_change_that_is_planned_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="planned twice"):
        Plan((change("a"), change("a")))
    with pytest.raises(ValueError, match="planned twice"):
        select([change("a"), change("a")], ["s"])


# -- a command that covers only some steps ----------------------------------------------------------------------------


@pytest.fixture
def every() -> list[Change]:
    return [
        change("f", step="download"),
        change("unrelated", step="download"),
        change("f", "head/download/f", step="sync"),
        change("t", step="template"),
        change("go", "head/sync/f", "head/template/t", "head/tune/gone", step="start"),
    ]


@pytest.mark.parametrize(
    ("steps", "chosen", "pending"),
    [
        (["download"], ["head/download/f", "head/download/unrelated"], []),
        (["sync"], ["head/sync/f"], ["head/download/f"]),
        (["download", "sync"], ["head/download/f", "head/download/unrelated", "head/sync/f"], []),
        (["start"], ["head/start/go"], ["head/download/f", "head/sync/f", "head/template/t"]),
        (["sync", "start"], ["head/sync/f", "head/start/go"], ["head/download/f", "head/template/t"]),
        (["tune"], [], []),
        ([], [], []),
    ],
)
def test_select(every: list[Change], steps: list[str], chosen: list[str], pending: list[str]) -> None:
    plan, needed = select(every, steps)
    assert ([item.key for item in plan.changes], [item.key for item in needed]) == (chosen, pending)


def test_proofs_carry_their_change() -> None:
    item = change("a")
    (applied,) = apply(Plan((item,)), RecordingReporter()).applied
    assert applied == Applied(item, "seen", applied.begun, applied.ended)
