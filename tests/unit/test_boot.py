from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from sparkserve import boot, lifecycle
from sparkserve.errors import SparkserveError
from sparkserve.hosts import CommandResult, LocalHost
from sparkserve.lifecycle import Session


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    directory = tmp_path / "a directory"
    directory.mkdir()
    (directory / ".env").write_text("SPARKSERVE_WORKER=spark@10.0.0.2\n")
    monkeypatch.chdir(directory)
    monkeypatch.setattr("sys.argv", ["/opt/sparkserve/bin/sparkserve", "service"])
    monkeypatch.setattr(boot, "_PATH", str(tmp_path / "units" / boot.NAME))
    (tmp_path / "units").mkdir()
    nobody = cast("Any", None)
    return lifecycle.open_session("service", Path(".env"), {}, {}, nobody)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let root do everything here but systemctl, which is only noted."""
    calls: list[list[str]] = []

    def sudo(_host: LocalHost, argv: list[str], *, stdin: bytes = b"", timeout: float = 60.0) -> CommandResult:
        calls.append([word for word in argv if not word.startswith("set -e")])
        if argv[0] == "systemctl":
            return CommandResult(tuple(argv), 0, b"", b"")
        return LocalHost("head").run(argv, stdin=stdin, timeout=timeout)

    monkeypatch.setattr(LocalHost, "sudo", sudo)
    monkeypatch.setattr(boot, "give_sudo_password", lambda *_: None)
    return calls


def systemctl(calls: list[list[str]]) -> list[str]:
    return [" ".join(argv[1:]) for argv in calls if argv[0] == "systemctl"]


def test_the_unit_is_one_that_systemd_takes(session: Session, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.fail("systemd-analyze is not there: apt-get install systemd")
    program = tmp_path / "bin" / "sparkserve"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = boot.look(session).text.replace("/opt/sparkserve/bin/sparkserve", str(program))
    unit = tmp_path / boot.NAME
    unit.write_text(text)
    answer = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True, check=False)
    told = [line for line in answer.stderr.splitlines() if boot.NAME in line]
    assert (answer.returncode, told) == (0, []), answer.stderr


def test_the_unit_runs_the_watch_where_the_settings_are(session: Session) -> None:
    unit = boot.look(session)
    assert unit.state == "absent"
    directory = Path.cwd()
    assert f"WorkingDirectory={directory}" in unit.text
    assert f'ExecStart=/opt/sparkserve/bin/sparkserve watch --env-file "{directory}/.env"' in unit.text
    assert "spark@10.0.0.2" in unit.text


def test_install_writes_enables_and_starts_without_a_reload(session: Session, ran: list[list[str]]) -> None:
    boot.install(session, boot.look(session))
    assert boot.look(session).state == "as wanted"
    assert systemctl(ran) == ["--no-reload enable sparkserve.service", "start sparkserve.service"]


def test_a_changed_unit_waits_for_a_head_on_which_nothing_runs(
    session: Session, ran: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(boot._PATH).write_text("[Service]\n")
    unit = boot.look(session)
    assert unit.state == "different"
    running = type("Facts", (), {"containers": [type("Container", (), {"is_running": True})()]})()
    monkeypatch.setattr(boot, "gather", lambda _node: running)
    with pytest.raises(SparkserveError) as caught:
        boot.install(session, unit)
    assert (caught.value.code, caught.value.exit_code, ran) == ("service_changes", 3, [])
    running.containers.clear()
    boot.install(session, unit)
    assert systemctl(ran)[:2] == ["stop sparkserve.service", "daemon-reload"]
    assert boot.look(session).state == "as wanted"


def test_what_systemd_refuses_is_told(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SparkserveError("command_failed", "it failed", details="Unit is masked")

    unit = boot.look(session)
    monkeypatch.setattr(boot, "give_sudo_password", lambda *_: None)
    monkeypatch.setattr(LocalHost, "sudo", refuse)
    Path(unit.path).write_text(unit.text)
    with pytest.raises(SparkserveError) as caught:
        boot.install(session, boot.look(session))
    assert (caught.value.code, caught.value.details) == ("service_failed", "Unit is masked")
    assert caught.value.hint.startswith("journalctl")


def test_remove_takes_all_away_and_again_says_so(session: Session, ran: list[list[str]]) -> None:
    boot.install(session, boot.look(session))
    ran.clear()
    assert "would be" in boot.remove(session, dry_run=True)
    assert (Path(boot._PATH).exists(), ran) == (True, [])
    assert "the pair goes on" in boot.remove(session)
    assert not Path(boot._PATH).exists()
    assert systemctl(ran) == ["stop sparkserve.service", "--no-reload disable sparkserve.service"]
    assert "was not there" in boot.remove(session)


@pytest.mark.parametrize(
    ("word", "quoted"), [("/a/b", "/a/b"), ("/a b", '"/a b"'), ("/50%", "/50%%"), ("/$HOME x", '"/$$HOME x"')]
)
def test_words_that_mean_something_to_systemd(word: str, quoted: str) -> None:
    assert boot._quoted(word) == quoted


def test_settings_that_are_in_no_file_make_no_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session = lifecycle.open_session(
        "service", Path(".env"), {"SPARKSERVE_WORKER": "spark@10.0.0.2"}, {}, cast("Any", None)
    )
    with pytest.raises(SparkserveError, match=r"there is no .*\.env"):
        boot.look(session)
