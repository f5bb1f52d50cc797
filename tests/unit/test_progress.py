"""What is told of a plan that takes hours: both nodes, total, rate, time left, and the large files."""

from __future__ import annotations

import pytest

from sparkserve import progress
from sparkserve.plan import Applied, Change, Plan, Work
from sparkserve.progress import GroupReporter, LineReporter

GB = 1_000_000_000


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def action(work: Work) -> str:
    raise AssertionError("only shown")


def change(name: str, size: int, node: str = "head", step: str = "download") -> Change:
    return Change(node, step, name, "missing", "there", action, size=size)


SHARD, TABLE, SMALL = change("m/shard", 5 * GB), change("m/table", 100 * GB), change("m/config.json", 1000)


def test_rate_and_time_left_follow_the_last_half_minute(clock: Clock) -> None:
    reporter = GroupReporter(Plan((TABLE,)))
    reporter.started(TABLE)
    for second in range(1, 101):
        clock.now = 1000.0 + second
        reporter.progress(TABLE, second * GB // 10 if second <= 50 else 5 * GB + (second - 50) * GB // 100, 100 * GB)
    (group,) = reporter.groups.values()
    assert group.rate == pytest.approx(10e6, rel=0.05)
    assert group.describe() == "head: download 5.5 GB of 100.0 GB, 10.0 MB/s, 2 h 37 min left, table 5 %"


def test_what_an_earlier_run_brought_is_no_speed(clock: Clock) -> None:
    reporter = GroupReporter(Plan((TABLE,)))
    reporter.started(TABLE)
    reporter.progress(TABLE, 60 * GB, 100 * GB)
    clock.now += 10
    reporter.progress(TABLE, 61 * GB, 100 * GB)
    (group,) = reporter.groups.values()
    assert group.done == 61 * GB
    assert group.rate == pytest.approx(0.1 * GB)


def test_large_files_are_told_one_by_one_and_only_while_they_come(clock: Clock) -> None:
    reporter = GroupReporter(Plan((TABLE, SHARD, SMALL)))
    for one in (TABLE, SHARD, SMALL):
        reporter.started(one)
    reporter.progress(TABLE, 25 * GB, 100 * GB)
    reporter.progress(SHARD, GB, 5 * GB)
    (group,) = reporter.groups.values()
    assert group.describe().endswith("26.0 GB of 105.0 GB, table 25 %, shard 20 %, m/config.json")
    reporter.finished(Applied(SHARD, "proved", 0.0, 1.0))
    assert group.large == ["table 25 %"]
    assert "1 of 3" in group.describe()


def test_a_file_that_begins_anew_shows_no_negative_speed(clock: Clock) -> None:
    reporter = GroupReporter(Plan((TABLE,)))
    reporter.started(TABLE)
    for done in (0, 90 * GB, 1 * GB):
        clock.now += 2
        reporter.progress(TABLE, done, 100 * GB)
    (group,) = reporter.groups.values()
    assert group.rate >= 0


def test_a_pipe_gets_a_line_an_interval_for_each_node_and_step(clock: Clock) -> None:
    lines: list[str] = []
    copy = change("m/table", 100 * GB, "worker", "sync")
    reporter = LineReporter(Plan((TABLE, copy)), lines.append, interval=10)
    reporter.started(TABLE)
    reporter.started(copy)
    for second in range(1, 21):
        clock.now = 1000.0 + second
        for one in (TABLE, copy):
            reporter.progress(one, second * GB, 100 * GB)
    assert [line.partition(" ")[0] for line in lines] == ["head:", "worker:"] * 3
    reporter.finished(Applied(TABLE, "sha256:0123", 0.0, 1.0))
    assert lines[-1].startswith("head: download done: sha256:0123") or "head: download done: sha256:0123" in lines[-2]


def test_a_pipe_gets_a_line_a_minute_of_a_start_and_each_new_phase_at_once(clock: Clock) -> None:
    lines: list[tuple[float, str]] = []
    ready = change("ready", 0, step="start")
    reporter = LineReporter(Plan((ready,)), lambda text: lines.append((clock.now - 1000.0, text)))
    reporter.started(ready)
    for second in range(1, 301):
        clock.now = 1000.0 + second
        phase = "starting" if second < 90 else f"loading layers {second // 10}/40" if second < 200 else "warming up"
        last = f"rank {second % 2} says: {'-' * second}"
        reporter.note(ready, f"rank 0: {phase}; 99.{second % 10} / 80.0 GiB available; {second} s | {last}")
    reporter.note(ready, "rank 0: starting; 99.0 / 80.0 GiB available; 300 s")
    assert [moment for moment, _ in lines] == [0, 1, 61, 90, 150, 200, 260]
    assert [text.split("; ")[0] for _, text in lines[1:]] == [
        "head: start rank 0: starting",
        "head: start rank 0: starting",
        "head: start rank 0: loading layers 9/40",
        "head: start rank 0: loading layers 15/40",
        "head: start rank 0: warming up",
        "head: start rank 0: warming up",
    ]
