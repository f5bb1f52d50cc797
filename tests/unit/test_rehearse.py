"""What a rehearsal makes of what the commands print, and that it fails where a step is no longer to be seen there."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.lab import rehearse
from tests.lab.rehearse import A_DEATH, ENGINES, KILL, MADE, PROOFS, SUMMARY, Typed, read_table
from tests.unit.cases import CASES

UP, STOP = Typed(("up",), shows=MADE), Typed(("stop",), shows=("stop",))


def recorded(name: str) -> list[str]:
    """What a command printed in a rehearsal of 30 November 2026."""
    return (CASES / "rehearse" / f"{name}.txt").read_text().splitlines()


def test_both_tables_are_read_from_one_output() -> None:
    lines = recorded("up")
    steps = read_table(lines, *SUMMARY)
    assert [row[0] for row in steps] == [line.split()[0] for line in lines[1:13]]
    assert steps[6] == ["build", "head", "3 layers, 0.09 GB, amd64, starts and knows all 16 flags", "3.4 s"]
    assert [row[:2] for row in read_table(lines, *PROOFS)] == [
        [name, "ok"] for name in ("answer", "thinking", "tool", "schema", "needle")
    ]


def test_what_is_no_table_of_these_columns_is_none() -> None:
    lines = recorded("up")
    assert read_table(lines, "step", "node", "proof") == []
    assert read_table(lines, *SUMMARY, "more") == []
    assert read_table([lines[0], *(f"   {line}" for line in lines[1:])], *SUMMARY) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_every_line_asks_for_the_steps_and_the_states(engine: str) -> None:
    _, line = ENGINES[engine]
    shown = [word for typed in line for word in typed.shows]
    assert {*MADE, "stop", "running", "stopped"} <= {*shown}
    killed = [place for place, typed in enumerate(line) if typed.words == KILL]
    assert [line[place : place + len(A_DEATH)] for place in killed] == ([A_DEATH] if engine else [])


class Node:
    """Prints what was recorded; counts what is killed on it."""

    management_address = hostname = link_address = "10.0.0.1"

    def __init__(self, printed: dict[str, list[str]], code: int = 0) -> None:
        self.printed = printed
        self.code = code
        self.docker_words: list[tuple[str, ...]] = []

    def popen(self, argv: list[str], **streams: Any) -> subprocess.Popen[bytes]:
        text = "\n".join(self.printed[" ".join(argv)])
        script = 'printf "%s\\n" "$1"; exit "$2"'
        return subprocess.Popen(["sh", "-c", script, "sh", text, str(self.code)], **streams)

    def docker(self, *words: str) -> str:
        self.docker_words.append(words)
        return f"{words[-1]}\n"


def rehearsed(monkeypatch: pytest.MonkeyPatch, node: Node, *line: Typed) -> int:
    """Rehearse a line on nodes that print what was recorded."""

    @contextmanager
    def paired() -> Iterator[Any]:
        yield SimpleNamespace(head=node, worker=node, command=lambda *words: [*words])

    monkeypatch.setattr(rehearse, "paired", paired)
    monkeypatch.setattr(rehearse, "ENGINES", {"": (lambda _pair: None, line)})
    monkeypatch.setattr("sys.argv", ["rehearse"])
    monkeypatch.setattr("sys.stderr", None)
    return rehearse.main()


def test_a_rehearsal_whose_every_step_is_shown_is_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node({"up": recorded("up"), "stop": recorded("stop")})
    assert rehearsed(monkeypatch, node, UP, Typed(KILL), STOP) == 0
    assert node.docker_words == [("kill", "sparkserve-rank1")]
    table = capsys.readouterr().out.splitlines()
    begins = [line.split()[:2] for line in table[table.index("") :]]
    for row in (["download", "head"], ["verify", "head"], ["stop", "head"]):
        assert row in begins


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("  proof  ", "  proved ", [*MADE[:-1]]),
        ("  verdict  ", "  finding  ", ["verify"]),
        ("build ", "make  ", ["build"]),
        ("\nstart ", "\n         start ", ["start"]),
    ],
)
def test_a_step_that_is_not_to_be_seen_fails_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], old: str, new: str, missing: list[str]
) -> None:
    text = "\n".join(recorded("up"))
    assert old in text
    node = Node({"up": text.replace(old, new).splitlines(), "stop": recorded("stop")})
    assert rehearsed(monkeypatch, node, UP, STOP) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "not shown by up" in line]
    assert [row[0] for row in rows] == missing


@pytest.mark.parametrize(
    ("name", "shows", "wanted"),
    [
        ("status", ("running",), 0),
        ("status_stopped", ("running",), 1),
        ("status_stopped", ("stopped",), 0),
        ("up_again", ("No changes", "verify"), 0),
        ("up", ("No changes",), 1),
        ("verify", ("verify",), 0),
        ("stop_again", ("verify",), 1),
        ("stop_again", ("nothing of ours was running",), 0),
        ("stop_again", ("stop",), 1),
    ],
)
def test_a_state_or_a_word_is_that_of_the_first_line(
    monkeypatch: pytest.MonkeyPatch, name: str, shows: tuple[str, ...], wanted: int
) -> None:
    assert rehearsed(monkeypatch, Node({"status": recorded(name)}), Typed(("status",), shows=shows)) == wanted


def test_a_wrong_exit_code_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rehearsed(monkeypatch, Node({"stop": recorded("stop")}, code=1), STOP) == 1
