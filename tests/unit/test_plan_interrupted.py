from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.unit.cases import ROOT

INT, TERM = signal.SIGINT, signal.SIGTERM


@pytest.fixture
def ending() -> Iterator[subprocess.Popen[str]]:
    """A plan under way; a change of it takes a line to end after an interrupt."""
    argv = [sys.executable, "-m", "tests.unit.interrupted_plan"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
        yield process
        process.kill()


def say(process: subprocess.Popen[str], *numbers: signal.Signals) -> None:
    """Send signals one by one: the first takes effect when a change is ending, the second when there was a word."""
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "under way\n"
    process.send_signal(numbers[0])
    assert process.stdout.readline() == "ending\n"
    if numbers[0] == INT:
        assert (process.stderr.readline(), process.stderr.readline()) == ("\n", "ending…\n")
    for number in numbers[1:]:
        process.send_signal(number)
        if number == INT:
            assert process.stderr.readline() == "\n"
            assert "Ctrl-C once more" in process.stderr.readline()


@pytest.mark.parametrize(
    ("numbers", "exit_code"),
    [((INT,), 130), ((TERM,), 143), ((INT, INT), 130), ((INT, TERM), 130), ((TERM, TERM), 143), ((TERM, INT), 143)],
)
def test_an_interrupt_lets_changes_end_and_reports_each(
    ending: subprocess.Popen[str], numbers: tuple[signal.Signals, ...], exit_code: int
) -> None:
    say(ending, *numbers)
    answer, _ = ending.communicate("end\n", timeout=60)
    assert ending.returncode == exit_code
    assert json.loads(answer) == {
        "applied": ["finishes", "first"],
        "failed": ["breaks"],
        "not_reached": ["later", "polite"],
    }


def test_who_insists_is_let_go_with_a_word_about_what_is_left(ending: subprocess.Popen[str]) -> None:
    say(ending, INT, INT)
    ending.send_signal(INT)
    assert ending.wait(60) == 130
    assert ending.stderr is not None
    assert "sparkserve stop" in ending.stderr.read()
