"""The bench: verdicts, its one line a figure, its JSON and its exit code."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.bench.__main__ import main, report
from tests.bench.figures import Figure, median_of_pairs, median_seconds, run_quietly


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
