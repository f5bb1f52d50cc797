"""The bench: verdicts, its one line a figure, its JSON and its exit code."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.bench import stream
from tests.bench.__main__ import main, report
from tests.bench.figures import Figure, connections, median_of_pairs, median_seconds, run_quietly
from tests.bench.groups import doctor
from tests.lab.pair import Pair


class Clock:
    """A clock that only moves when an action says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def action(self, *durations: float) -> Callable[[], None]:
        left = list(durations)

        def act() -> None:
            self.now += left.pop(0)

        return act


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("tests.bench.figures.time.perf_counter", lambda: clock.now)
    return clock


@pytest.mark.parametrize(
    ("figure", "line"),
    [
        (Figure("a", 0.2, "s", 0.2), "figure a 0.2 s limit 0.2 ok"),
        (Figure("a", 0.21, "s", 0.2), "figure a 0.21 s limit 0.2 short"),
        (Figure("b", 1.5, "times", 1.5, better="more"), "figure b 1.5 times limit 1.5 ok"),
        (Figure("b", 1.4, "times", 1.5, better="more"), "figure b 1.4 times limit 1.5 short"),
        (Figure("c", None, "times", 1), "figure c n/a times limit 1 n/a"),
    ],
)
def test_the_line_of_a_figure(figure: Figure, line: str) -> None:
    assert figure.line() == line


def test_a_short_figure_fails_and_is_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "new" / "results.json"
    measured = {"one": [Figure("a", 1, "s", 2), Figure("b", None, "s", 2)], "two": [Figure("c", 3, "s", 2)]}
    assert report(measured, results) == 1
    rows = json.loads(results.read_text())["figures"]
    assert [(row["group"], row["name"], row["value"], row["verdict"]) for row in rows] == [
        ("one", "a", 1, "ok"),
        ("one", "b", None, "n/a"),
        ("two", "c", 3, "short"),
    ]
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_figures_that_hold_or_have_no_peer_pass(tmp_path: Path) -> None:
    assert report({"one": [Figure("a", 1, "s", 2), Figure("b", None, "s", 2)]}, tmp_path / "results.json") == 0


def test_a_measurement_that_raises_leaves_what_was_printed_and_nothing_older(tmp_path: Path) -> None:
    def measured() -> Iterator[Figure]:
        yield Figure("a", 1, "s", 2)
        raise RuntimeError("the pair does not start")

    results = tmp_path / "results.json"
    assert report({"one": [Figure("old", 1, "s", 2)]}, results) == 0
    with pytest.raises(RuntimeError, match="does not start"):
        report({"one": measured(), "two": [Figure("b", 1, "s", 2)]}, results)
    assert [row["name"] for row in json.loads(results.read_text())["figures"]] == ["a"]


def test_an_unknown_group_is_an_error_that_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["clj"])
    assert "no group clj; there are: cli" in capsys.readouterr().err


def test_the_first_run_is_not_counted(clock: Clock) -> None:
    assert median_seconds(clock.action(100, 1, 5, 2), 3) == 2


def test_pairs_are_combined_one_by_one(clock: Clock) -> None:
    # The machine gets three times slower on the way: medians of each side would give 6/2, each pair says 2.
    ours, theirs = clock.action(100, 2, 6, 6), clock.action(100, 1, 3, 3)
    assert median_of_pairs(ours, theirs, 3, lambda mine, other: mine / other) == 2


def test_a_command_that_fails_spoils_the_figure() -> None:
    with pytest.raises(RuntimeError, match=r"^false: exit 1"):
        run_quietly(["false"])


def pair_that_answers(*checks: tuple[str, str]) -> Pair:
    """A pair whose every command gives these checks with these verdicts."""
    told = [{"id": name, "node": "head", "verdict": verdict} for name, verdict in checks]
    answer: dict[str, Any] = {"data": {"checks": told}}
    return cast(Pair, SimpleNamespace(ask=lambda *_: answer))


@pytest.mark.parametrize(
    ("name", "verdict", "counts"),
    [
        ("memory", "ok", True),
        ("sudo", "warn", True),
        ("memory", "fail", False),
        ("reach", "unseen", False),
        ("link_bandwidth", "fail", True),
        ("link_bandwidth", "unseen", False),
    ],
)
def test_a_check_up_that_did_not_look_has_no_time(name: str, verdict: str, counts: bool) -> None:
    pair = pair_that_answers(("clock", "ok"), (name, verdict))
    if counts:
        assert doctor._seconds(pair) >= 0
        return
    with pytest.raises(RuntimeError, match=f"sparkserve doctor: .*{name}"):
        doctor._seconds(pair)


def test_a_check_up_that_gave_nothing_has_no_time() -> None:
    with pytest.raises(RuntimeError, match="sparkserve doctor"):
        doctor._seconds(pair_that_answers())


@pytest.mark.parametrize(("counts", "verdict"), [([1], "ok"), ([1, 1], "ok"), ([1, 2], "short")])
def test_one_connection_is_right_and_more_are_too_many(counts: list[int], verdict: str) -> None:
    assert connections("a_connections", counts).verdict == verdict


@pytest.mark.parametrize("counts", [[0], [1, 0]])
def test_who_made_no_connection_did_not_look(counts: list[int]) -> None:
    with pytest.raises(RuntimeError, match="a_connections: without any"):
        connections("a_connections", counts)


@pytest.mark.parametrize(
    ("rates", "lost"),
    [
        # The machine gets slower within one pair, then faster: medians of each side would say 38.75, then 0.
        ([100, 98, 50, 49, 80, 40], 2),
        ([100, 80, 50, 40, 80, 100], 20),
        ([50, 60, 50, 60, 50, 60], 0),
    ],
)
def test_what_a_stream_loses_is_taken_pair_by_pair(
    monkeypatch: pytest.MonkeyPatch, rates: list[float], lost: float
) -> None:
    left = iter(rates)
    monkeypatch.setattr(stream, "_stream_rate", lambda *_: next(left))
    assert stream.percent_lost(cast(Pair, None), nullcontext) == pytest.approx(lost)
