from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sparkserve.errors import SparkserveError
from sparkserve.settings import Settings
from sparkserve.ssh import SshTarget, resolve_target
from tests.unit.cases import read_rows, row_name
from tests.unit.sshd import make_key, put_first_on_path

SCRIPT = """#!/bin/sh
printf '%s\\n' "$@" > "$0.words"
cat "$0.answer"
echo "some words" >&2
exit $(cat "$0.code")
"""


class FakeSsh:
    """An `ssh` that answers `-G` with the text of the case and keeps its arguments."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        put_first_on_path(directory, "ssh", SCRIPT, monkeypatch)
        self._path = directory / "ssh"
        self.answer("hostname h\nuser u\nport 22\n")

    def answer(self, text: str, code: int = 0) -> None:
        self._path.with_name("ssh.answer").write_text(text)
        self._path.with_name("ssh.code").write_text(str(code))

    @property
    def words(self) -> list[str]:
        return self._path.with_name("ssh.words").read_text().splitlines()


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    return FakeSsh(tmp_path / "bin", monkeypatch)


@pytest.mark.parametrize("case", read_rows("ssh", "targets"), ids=row_name)
def test_target(fake_ssh: FakeSsh, tmp_path: Path, case: dict[str, Any]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).touch()
    fake_ssh.answer(case["answer"].replace("KEYS", str(tmp_path)))
    found = asdict(resolve_target(Settings(worker="nvidia@spark")))
    shown = json.loads(json.dumps(found, default=str).replace(str(tmp_path), "KEYS"))
    assert {name: shown[name] for name in case["target"]} == case["target"]
    assert shown["destination"] == "nvidia@spark"


def test_flags_of_ours_are_passed_on(fake_ssh: FakeSsh, tmp_path: Path) -> None:
    make_key(tmp_path / "my key")
    resolve_target(Settings(worker="spark", ssh_port=2222, ssh_key=tmp_path / "my key"))
    assert fake_ssh.words == ["-G", "-p", "2222", "-i", str(tmp_path / "my key"), "--", "spark"]


@pytest.mark.parametrize(
    ("make", "code", "told"),
    [
        (lambda path: None, "secret_missing", "No such file"),
        (lambda path: path.mkdir(), "secret_missing", "is a directory"),
        (lambda path: path.write_text("garbage"), "secret_invalid", "holds no private key"),
        (lambda path: make_key(path).with_suffix(".pub").replace(path), "secret_invalid", "holds no private key"),
        (lambda path: make_key(path).chmod(0o644), "secret_readable", "can be read by others"),
    ],
)
def test_a_key_that_ssh_would_pass_over_is_named(
    fake_ssh: FakeSsh, tmp_path: Path, make: Callable[[Path], object], code: str, told: str
) -> None:
    del fake_ssh
    path = tmp_path / "key"
    make(path)
    if path.is_file() and code == "secret_invalid":
        path.chmod(0o600)
    with pytest.raises(SparkserveError, match=told) as caught:
        resolve_target(Settings(worker="spark", ssh_key=path))
    assert (caught.value.code, caught.value.exit_code) == (code, 2)
    assert "SPARKSERVE_SSH_KEY" in caught.value.message


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_a_key_of_any_kind_is_taken(fake_ssh: FakeSsh, tmp_path: Path, kind: str) -> None:
    del fake_ssh
    key = make_key(tmp_path / "key", passphrase="secret", kind=kind)
    assert resolve_target(Settings(worker="spark", ssh_key=key)).user == "u"


def test_a_configuration_that_ssh_refuses(fake_ssh: FakeSsh) -> None:
    fake_ssh.answer("", code=255)
    with pytest.raises(SparkserveError) as caught:
        resolve_target(Settings(worker="spark"))
    assert (caught.value.code, caught.value.node, caught.value.details) == ("ssh_config", "head", "some words")


def test_no_ssh_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SparkserveError) as caught:
        resolve_target(Settings(worker="spark"))
    assert (caught.value.code, caught.value.node) == ("tool_missing", "head")


@pytest.fixture
def target(tmp_path: Path) -> SshTarget:
    return SshTarget(
        destination="spark",
        address="10.0.0.2",
        port=2222,
        user="nvidia",
        key_files=(tmp_path / "one", tmp_path / "two"),
        known_hosts=(),
        known_as="[10.0.0.2]:2222",
    )


def options(argv: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for flag, word in itertools.pairwise(argv) if flag == "-o")


def test_bulk_command_trusts_the_same_host_key(target: SshTarget, tmp_path: Path) -> None:
    argv = target.bulk_command()
    found = options(argv)
    assert (argv[0], argv[-1]) == ("ssh", "spark")
    assert (found["HostKeyAlias"], found["Port"], found["User"]) == ("[10.0.0.2]:2222", "2222", "nvidia")
    assert (found["BatchMode"], found["StrictHostKeyChecking"], found["ControlPath"]) == ("yes", "yes", "none")
    assert "HostName" not in found
    assert (found["Compression"], found["Ciphers"].partition(",")[0]) == ("no", "^aes128-gcm@openssh.com")
    assert argv[argv.index("-i") + 1] == str(tmp_path / "one")


def test_bulk_command_over_the_cable(target: SshTarget) -> None:
    found = options(target.bulk_command("192.168.177.12"))
    assert (found["HostName"], found["ProxyJump"]) == ("192.168.177.12", "none")
    assert found["HostKeyAlias"] == "[10.0.0.2]:2222"
