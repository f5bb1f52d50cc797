from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import SecretStr

from sparkserve.errors import Failures, SparkserveError
from sparkserve.lifecycle import Outcome
from sparkserve.output import Mode, Output, to_plain
from sparkserve.plan import Change, Plan, Work, apply
from sparkserve.settings import Settings
from sparkserve.tables import make_table, plan_table
from tests.unit.cases import ROOT

SECRET = "hf_TopSecretValue"
# A table and a plan under way, for a person.
SHOW = """
from rich.table import Table
from rich.text import Text
from sparkserve.output import Mode, Output
from sparkserve.plan import Change, Plan, apply
output = Output(Mode.HUMAN)
table = Table(box=None, header_style="bold")
table.add_column("name")
table.add_column("value")
table.add_row(Text("right", style="green"), "x" * 400)
def action(work):
    work.progress(5, 10)
    return "[red]proved[/red]"
plan = Plan((Change("head", "build", "image", "-", "+", action),))
with output.reporter(plan) as reporter:
    apply(plan, reporter)
output.say("on the way")
output.result("show", {}, table, "[red]brackets stay[/red]")
"""
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|9[0-7]|38|48)[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class Result:
    path: Path
    token: SecretStr
    rows: tuple[Any, ...]
    more: Mapping[str, Any]
    hidden: str = dataclasses.field(default=SECRET, repr=False)


def test_plain_data() -> None:
    found = to_plain(Result(Path("/x"), SecretStr(SECRET), (1, None, True, 2.5), MappingProxyType({"a": {"b"}})))
    assert found == {"path": "/x", "token": "**********", "rows": [1, None, True, 2.5], "more": {"a": ["b"]}}


def test_secrets_have_no_way_through() -> None:
    data = {
        "settings": Settings(hf_token=SecretStr(SECRET)),
        "list": [SecretStr(SECRET)],
        "tuple": (SecretStr(SECRET),),
    }
    assert SECRET not in json.dumps(to_plain(data))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_json_has_no_word_for(value: float) -> None:
    assert json.loads(json.dumps(to_plain({"rate": value}), allow_nan=False)) == {"rate": None}


def only_object(text: str) -> dict[str, Any]:
    assert text.count("\n") == 1
    found: dict[str, Any] = json.loads(text)
    assert list(found) == ["schema", "command", "status", "exit_code", "data", "errors"]
    return found


@pytest.mark.parametrize(("exit_code", "status"), [(0, "ok"), (4, "failed"), (1, "failed")])
def test_json_result(capsys: pytest.CaptureFixture[str], exit_code: int, status: str) -> None:
    output = Output(Mode.JSON)
    output.say("on the way")
    output.warn("careful")
    output.result("up", {"grüße": "日本"}, "for people", exit_code=exit_code)
    printed = capsys.readouterr()
    found = only_object(printed.out)
    assert (found["schema"], found["command"], found["status"], found["exit_code"]) == (1, "up", status, exit_code)
    assert (found["data"], found["errors"], printed.err) == ({"grüße": "日本"}, [], "")


def test_json_error_lists_every_single_error(capsys: pytest.CaptureFixture[str]) -> None:
    inner = Failures([SparkserveError("a", "first", "do this", "head"), SparkserveError("b", "second", exit_code=3)])
    Output(Mode.JSON).error("start", Failures([inner, SparkserveError("c", "third", details="words")]), {"partly": 1})
    found = only_object(capsys.readouterr().out)
    assert (found["status"], found["exit_code"], found["data"]) == ("failed", 1, {"partly": 1})
    assert [error["code"] for error in found["errors"]] == ["a", "b", "c"]
    first = found["errors"][0]
    assert (first["node"], first["message"], first["hint"]) == ("head", "first", "do this")


def test_an_error_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    error = SparkserveError("a", "it broke", "mend it", "worker", "line one\nline two")
    Output(Mode.HUMAN).error("start", error)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == "error: worker: it broke\n    line one\n    line two\nhint: mend it\n"


def test_a_pipe_gets_lines_without_blanks_at_their_end(capsys: pytest.CaptureFixture[str]) -> None:
    Output(Mode.HUMAN).show(make_table("name", "why", rows=[("a", "x" * 200), ("b", "")]))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert [line.split() for line in lines] == [["name", "why"], ["a", "x" * 200], ["b"]]


def test_tables_come_before_what_is_said_after_them() -> None:
    script = SHOW + 'output.show(table)\noutput.say("hint: below")\n'
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    assert done.stdout.decode().splitlines()[-1] == "hint: below"


def test_what_is_told_names_the_settings_file(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Mode.HUMAN, "b.env")
    output.say("hint: sparkserve up")
    output.warn("`sparkserve stop` ends it")
    output.show("write to .env", make_table("run", rows=[("a" * 80,)], caption="`sparkserve logs --run RUN`"))
    printed = capsys.readouterr()
    assert printed.err == "hint: sparkserve up -e b.env\nwarning: `sparkserve stop -e b.env` ends it\n"
    assert [printed.out.splitlines()[0], printed.out.splitlines()[-1].strip()] == [
        "write to b.env",
        "`sparkserve logs -e b.env --run RUN`",
    ]


def test_quiet_says_errors_and_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Mode.QUIET)
    output.say("on the way")
    output.result("up", {}, "for people")
    assert capsys.readouterr() == ("", "")
    output.warn("careful")
    output.error("up", SparkserveError("a", "it broke"))
    assert capsys.readouterr() == ("", "warning: careful\nerror: it broke\n")


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.QUIET])
def test_a_plan_under_way_prints_nothing_for_programs(capsys: pytest.CaptureFixture[str], mode: Mode) -> None:
    def action(work: Work) -> str:
        work.note("going")
        work.progress(1, 2)
        return "done"

    plan = Plan((Change("head", "s", "r", "-", "+", action, size=2),))
    with Output(mode).reporter(plan) as reporter:
        apply(plan, reporter)
    assert capsys.readouterr() == ("", "")


def test_nobody_there_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(os.devnull).open() as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        with pytest.raises(SparkserveError) as caught:
            Output(Mode.HUMAN).ask("Replace it?")
        assert (caught.value.code, caught.value.exit_code, caught.value.hint) == ("needs_yes", 2, "add --yes")
        assert Output(Mode.HUMAN).ask_secret("Password") is None


@pytest.mark.parametrize(("number", "text"), [(1, "1 change, "), (2, "2 changes, ")])
def test_changes_are_counted(number: int, text: str) -> None:
    changes = [Change("head", "build", f"image {one}", "-", "+", lambda _work: "") for one in range(number)]
    assert str(plan_table(Outcome(("build",), Plan(tuple(changes)))).caption).startswith(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_end_of_the_input_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal("\n"))
    output = Output(Mode.HUMAN)
    assert output.ask_value("Where?", "here", "--where") == "here"
    for question in (lambda: output.ask_value("Where?", "here", "--where"), lambda: output.ask("Really?")):
        with pytest.raises(SparkserveError) as caught:
            question()
        assert (caught.value.code, caught.value.exit_code) == ("interrupted", 130)


# -- pipes and terminals ----------------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return {**kept, "TERM": "xterm-256color", **more}


def test_a_pipe_gets_plain_whole_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        check=True,
        timeout=30,
    )
    assert "\x1b" not in done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "right" in line]
    assert row.split() == ["right", "x" * 400]
    assert "[red]brackets stay[/red]" in done.stdout
    assert "head: build done: [red]proved[/red]" in done.stderr
    assert done.stderr.endswith("on the way\n")


def on_terminal(script: str, env: dict[str, str]) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs, cwd=ROOT, env=env
    )
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 65536):
            text += chunk
    except OSError:
        pass  # the kernel's way to say that the other end is closed
    finally:
        os.close(ours)
    assert process.wait(30) == 0, text
    return text.decode()


def test_a_terminal_gets_colours_unless_told_otherwise() -> None:
    assert COLOUR.search(on_terminal(SHOW, environment()))
    plain = on_terminal(SHOW, environment(NO_COLOR="1"))
    assert COLOUR.search(plain) is None
    assert "right" in plain
    assert "[red]proved[/red]" in plain


def test_a_dumb_terminal_gets_no_live_bars() -> None:
    text = on_terminal(SHOW, environment(TERM="dumb"))
    assert "\x1b" not in text
    assert "head: build done: [red]proved[/red]" in text


def test_a_character_that_the_encoding_lacks_is_escaped() -> None:
    script = "from sparkserve.output import open_streams; open_streams(); print(chr(177), '1 s')"
    env = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert on_terminal(script, env) == "\\xb1 1 s\r\n"
