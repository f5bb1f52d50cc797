from __future__ import annotations

import errno
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer import Typer

from sparkserve import cli, lifecycle
from sparkserve.errors import EXIT_USAGE, SparkserveError
from sparkserve.plan import Applied, ApplyReport, Change, Interrupted
from sparkserve.settings import nearest_name
from sparkserve.signals import Terminated
from tests.unit.cases import read_rows, row_name

SECRET = "hf_TopSecretValue"


@pytest.fixture(autouse=True)
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give every test a directory without settings, and a state directory of its own."""
    for name in [*map(str, __import__("os").environ)]:
        if name.startswith(("SPARKSERVE_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def run_json(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = cli._run(words)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1, printed
    found: dict[str, Any] = json.loads(printed)
    assert (found["exit_code"], found["status"]) == (code, "ok" if code == 0 else "failed")
    return found


@pytest.mark.parametrize("case", read_rows("cli", "errors"), ids=row_name)
def test_every_failure_is_one_object(clean: Path, capsys: pytest.CaptureFixture[str], case: dict[str, Any]) -> None:
    (clean / ".env").write_text(case.get("env", ""))
    found = run_json(case["words"], capsys)
    assert (found["exit_code"], [error["code"] for error in found["errors"]]) == (case["exit_code"], case["codes"])
    assert found["command"] == case.get("command", case["words"][0])
    assert list(clean.iterdir()) == [clean / ".env"]


@pytest.mark.parametrize("case", read_rows("cli", "errors"), ids=row_name)
def test_every_failure_for_people_is_on_stderr(
    clean: Path, capsys: pytest.CaptureFixture[str], case: dict[str, Any]
) -> None:
    (clean / ".env").write_text(case.get("env", ""))
    code = cli._run([word for word in case["words"] if word != "--json"])
    printed = capsys.readouterr()
    assert (code, printed.out) == (case["exit_code"], "")
    assert printed.err.count("error: ") == len(case["codes"])
    assert "Traceback" not in printed.err


def test_config_shows_every_setting_and_no_secret(
    clean: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (clean / ".env").write_text("SPARKSERVE_WORKER=me@spark-2\n")
    monkeypatch.setenv("HF_TOKEN", SECRET)
    rows = {row["name"]: row for row in run_json(["config", "--json"], capsys)["data"]["settings"]}
    assert (rows["SPARKSERVE_WORKER"]["value"], rows["SPARKSERVE_WORKER"]["source"]) == ("me@spark-2", ".env")
    assert (rows["HF_TOKEN"]["value"], rows["HF_TOKEN"]["source"]) == ("***", "environment")
    assert cli._run(["config"]) == 0
    assert SECRET not in capsys.readouterr().out


def test_config_shows_what_the_recipe_decides(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def seen(env: str) -> dict[str, tuple[str | None, str]]:
        (clean / ".env").write_text(env)
        rows = run_json(["config", "--json"], capsys)["data"]["settings"]
        return {row["name"].removeprefix("SPARKSERVE_"): (row["value"], row["source"]) for row in rows}

    found = seen("SPARKSERVE_CONTEXT=4096\n")
    assert (found["CONTEXT"], found["API_PORT"], found["REQUESTS"]) == (
        ("4096", ".env"),
        ("8888", "recipe"),
        ("4", "recipe"),
    )
    assert found["THINKING"] == ("False", "recipe")
    assert (found["MODELS_DIR"][1], found["IMAGE"]) == ("default", (None, "default"))
    assert seen("SPARKSERVE_RECIPE=nosuch\n")["API_PORT"] == (None, "default")
    assert cli._run(["config"]) == 0
    assert "what the recipe decides is not shown" in capsys.readouterr().err


def test_a_key_that_is_there_is_kept_and_named(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clean / ".env").mkdir()
    assert run_json(["key", "new", "--set", "--json"], capsys)["errors"][0]["code"] == "settings_unreadable"
    assert not (clean / "api-key").exists()
    (clean / ".env").rmdir()
    kept = [run_json(["key", "new", "--set", "--json"], capsys)["data"]["kept"]]
    text = (clean / "api-key").read_text()
    (clean / ".env").unlink()
    kept.append(run_json(["key", "new", "--set", "--json"], capsys)["data"]["kept"])
    assert (kept, (clean / "api-key").read_text()) == ([False, True], text)
    assert (clean / ".env").read_text() == f"SPARKSERVE_API_KEY_FILE={clean / 'api-key'}\n"
    assert cli._run(["key", "new", "--set"]) == 0
    assert "it holds from the next `sparkserve start` on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([""], "settings_invalid"),
        (["a;b"], "settings_invalid"),
        (["a", "--models-dir", "x"], "settings_invalid"),
        (["a", "--recipe", "nosuch"], "recipe_unknown"),
        (["a", "--env-file", "."], "settings_unreadable"),
    ],
)
def test_what_init_refuses_before_it_looks(
    clean: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: str
) -> None:
    found = run_json(["init", *words, "--json"], capsys)
    assert (found["exit_code"], [error["code"] for error in found["errors"]]) == (2, [code])
    assert list(clean.iterdir()) == []


def commands(group: Typer, *words: str) -> Iterator[tuple[str, frozenset[str]]]:
    """List every command with its parameters."""
    for item in group.registered_commands:
        assert item.callback is not None
        yield " ".join((*words, item.name or "")), frozenset(inspect.signature(item.callback).parameters)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, *words, inner.name or "")


def test_each_command_that_writes_has_a_dry_run() -> None:
    found = dict(commands(cli.app))
    without = {name for name, parameters in found.items() if "dry_run" not in parameters}
    looks = {"config", "connect", "history", "link", "logs", "plan", "status", "verify"}
    looks |= {"recipes check", "recipes show", "service show", "weights list"}
    assert without == looks


@pytest.mark.parametrize("words", [["key", "new"], ["key", "new", "--set"], ["recipes", "new", "mine"]])
def test_a_dry_run_writes_nothing_and_refuses_what_a_run_would(
    clean: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    words = [*words, "--json"]
    assert run_json([*words, "--dry-run"], capsys)["data"]["dry_run"] is True
    assert list(clean.iterdir()) == []
    path = Path(run_json(words, capsys)["data"]["path"])
    seen = {one: one.read_bytes() for one in clean.rglob("*") if one.is_file()}
    again = run_json([*words, "--dry-run"], capsys)
    assert again["data"]["kept"] if "--set" in words else again["exit_code"] == 2
    assert again == run_json(words, capsys) or "--set" in words
    assert {one: one.read_bytes() for one in clean.rglob("*") if one.is_file()} == seen
    assert path.is_file()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(("place", "code"), [("file/key", "key_unwritable"), ("nosuch/key", "key_unwritable")])
def test_where_no_key_can_be_written(
    clean: Path, capsys: pytest.CaptureFixture[str], place: str, code: str, more: list[str]
) -> None:
    (clean / "file").write_text("")
    found = run_json(["key", "new", "--file", place, "--json", *more], capsys)
    assert [error["code"] for error in found["errors"]] == [code]


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    names = [row["name"] for row in run_json(["recipes", "--json"], capsys)["data"]["recipes"]]
    assert "tensorfold-1017" in names


@pytest.mark.parametrize(
    ("words", "exit_code"), [(["--version"], 0), (["--help"], 0), (["up", "-h"], 0), ([], EXIT_USAGE)]
)
def test_help_and_version(capsys: pytest.CaptureFixture[str], words: list[str], exit_code: int) -> None:
    assert cli._run(words) == exit_code
    assert "sparkserve" in capsys.readouterr().out


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(lifecycle, "open_session", fail)


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (KeyboardInterrupt(), 130),
        (Interrupted(ApplyReport()), 130),
        (Interrupted(ApplyReport(), 143), 143),
        (Terminated(), 143),
    ],
)
def test_an_interrupt_is_one_object_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, exit_code: int
) -> None:
    raising(monkeypatch, error)
    found = run_json(["status", "--json"], capsys)
    assert (found["exit_code"], [item["code"] for item in found["errors"]]) == (exit_code, ["interrupted"])


def test_what_was_done_before_a_failure_or_an_interrupt_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    done, wrong, later = (
        Change("head", "download", name, "missing", "there", lambda _work: "proved") for name in ("a", "b", "c")
    )
    report = ApplyReport([Applied(done, "proved", 1.0, 2.5)], [(wrong, SparkserveError("disk_full", "full"))], [later])
    told = {
        "applied": [{"key": "head/download/a", "proof": "proved", "seconds": 1.5}],
        "failed": ["head/download/b"],
        "not_reached": ["head/download/c"],
        "left_alone": [],
    }
    with pytest.raises(SparkserveError) as caught:
        report.raise_failures()
    for error in (caught.value, Interrupted(report)):
        raising(monkeypatch, error)
        assert run_json(["status", "--json"], capsys)["data"] == told


def test_what_the_machine_refuses_is_no_bug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, OSError(errno.EROFS, "Read-only file system", "/srv/x"))
    found = run_json(["status", "--json"], capsys)
    assert [(error["code"], error["message"]) for error in found["errors"]] == [
        ("file_failed", "/srv/x: Read-only file system")
    ]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "words",
    [
        "diagnose --to /proc/nosuch/x",
        "diagnose --to=/proc/nosuch/x",
        "recipes new /proc/nosuch/x",
        "key new --file /proc/nosuch/x",
        "key new --set -e /proc/nosuch/.env",
        "plan --facts /proc/nosuch/x",
        "status -e /proc/nosuch/x",
        "status -r /proc/nosuch/x",
        "recipes check /proc/nosuch/x",
        "doctor --record /proc/nosuch/x",
        "stop",
    ],
)
def test_a_path_of_the_user_that_is_not_there_is_no_bug(
    clean: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    (clean / ".env").write_text("SPARKSERVE_WORKER=spark@127.0.0.1.invalid\n")
    if words == "stop":
        monkeypatch.setenv("XDG_STATE_HOME", "/proc/nosuch")
    found = run_json([*words.split(), "--json"], capsys)
    assert found["exit_code"] != 0
    assert "bug" not in [error["code"] for error in found["errors"]]
    assert all(error["hint"] for error in found["errors"])


def test_quiet_says_nothing_and_verbose_names_each_command(clean: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (clean / ".env").write_text("SPARKSERVE_WORKER=spark-2\n")
    assert cli._run(["config", "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    argv = [sys.executable, "-m", "sparkserve", "lock", "--verbose"]
    (clean / ".env").write_text("SPARKSERVE_ENGINE_REPOSITORY=/nowhere/engine.git\nHF_ENDPOINT=http://127.0.0.1:1\n")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert "sparkserve.hosts head: env GIT_TERMINAL_PROMPT=0" in done.stderr


def test_the_hint_of_an_error_names_the_settings_file(clean: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (clean / "b.env").write_text("")
    found = run_json(["status", "-e", "b.env", "--json"], capsys)
    assert [error["hint"] for error in found["errors"]] == ["sparkserve init -e b.env"]


@pytest.mark.parametrize(
    ("words", "first"), [("up --recipe tensor", "tensorfold-1017"), ("doctor --explain kern", "kernel")]
)
def test_names_are_completed(monkeypatch: pytest.MonkeyPatch, words: str, first: str) -> None:
    monkeypatch.setenv("_SPARKSERVE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"sparkserve {words}")
    monkeypatch.setenv("COMP_CWORD", "3")
    program = "import sys; sys.argv[0] = 'sparkserve'; from sparkserve.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[0] == first


def test_what_is_nothing_like_a_name_suggests_none() -> None:
    assert nearest_name("nosuch", ["source", "smoke"]) == ""
    assert nearest_name("kernell", ["kernel"]) == "; did you mean kernel?"


def test_a_bug_is_called_one_and_kept_in_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    raising(monkeypatch, ZeroDivisionError(f"by {SECRET}"))
    found = run_json(["status", "--json"], capsys)
    (error,) = found["errors"]
    assert (found["exit_code"], error["code"]) == (1, "bug")
    (log,) = (tmp_path / "state" / "sparkserve" / "bugs").iterdir()
    assert str(log) in error["hint"]
    assert "Traceback" in log.read_text()
    assert SECRET not in log.read_text() + json.dumps(found)
