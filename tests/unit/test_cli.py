from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import pytest

from sparkserve import cli, lifecycle
from sparkserve.errors import EXIT_USAGE, SparkserveError
from sparkserve.plan import Applied, ApplyReport, Change, Interrupted
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


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["a", "--worker", "b"], "worker_twice"),
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


def test_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    names = [row["name"] for row in run_json(["recipes", "list", "--json"], capsys)["data"]["recipes"]]
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
    }
    with pytest.raises(SparkserveError) as caught:
        report.raise_failures()
    for error in (caught.value, Interrupted(report)):
        raising(monkeypatch, error)
        assert run_json(["status", "--json"], capsys)["data"] == told


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
