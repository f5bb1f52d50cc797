from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sparkserve import ssh
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError
from sparkserve.settings import Settings
from sparkserve.ssh_trust import meet, offered_key, trust
from tests.unit.sshd import Client, Sshd, fingerprint, make_key

SETTINGS = Settings(worker="spark")


def nobody(question: str, flag: str) -> bool:
    raise AssertionError(f"asked {question}, or {flag}")


@pytest.fixture
def known(client: Client, tmp_path: Path) -> Path:
    """A known_hosts that does not exist yet, in a folder that does not either."""
    path = tmp_path / "new" / "known_hosts"
    client.set(UserKnownHostsFile=f"{path} {tmp_path}/second")
    return path


@pytest.fixture
def shown(server: Sshd) -> str:
    return fingerprint(Path(f"{server.host_key}.pub"))


@pytest.mark.parametrize("hashed", ["yes", "no"])
def test_a_trusted_key_is_good_for_ssh_and_for_us(client: Client, known: Path, server: Sshd, hashed: str) -> None:
    client.set(HashKnownHosts=hashed)
    key = offered_key(SETTINGS)
    assert key is not None
    assert not known.exists()
    trust(key)
    assert (known.stat().st_mode & 0o777, known.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert ("127.0.0.1" in known.read_text()) == (hashed == "no")
    assert offered_key(SETTINGS) is None
    client.connect().close()
    for argv in (["ssh", "-oBatchMode=yes", "-oStrictHostKeyChecking=yes", "spark"],
                 ssh.resolve_target(SETTINGS).bulk_command("127.0.0.1")):  # fmt: skip
        done = subprocess.run([*argv, "echo", "well"], capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "well\n", "")
    assert f"[127.0.0.1]:{server.port}" in key.question


@pytest.mark.parametrize("before", ["", "# mine\n", "other ssh-ed25519 AAAA", "other ssh-ed25519 AAAA\n"])
def test_what_was_there_stays(client: Client, known: Path, before: str) -> None:
    known.parent.mkdir()
    target = known.with_name("of the dotfiles")
    target.write_text(before)
    known.symlink_to(target)
    target.chmod(0o644)
    assert meet(SETTINGS, None, lambda question, flag: True) is not None
    lines = target.read_text().splitlines()
    assert lines[:-1] == before.splitlines()
    assert known.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o644
    client.connect().close()


def test_it_is_asked_once_with_the_fingerprint_and_the_flag(known: Path, shown: str) -> None:
    asked: list[tuple[str, str]] = []

    def yes(question: str, flag: str) -> bool:
        asked.append((question, flag))
        return True

    meet(SETTINGS, None, yes)
    meet(SETTINGS, None, nobody)
    assert [(shown in question, str(known) in question, flag) for question, flag in asked] == [
        (True, True, f"--accept-host-key {shown}")
    ]


def test_the_very_fingerprint_needs_nobody(client: Client, known: Path, shown: str) -> None:
    del known
    meet(SETTINGS, shown, nobody)
    client.connect().close()


@pytest.mark.parametrize("accept", ["SHA256:" + "A" * 43, "", None])
def test_nothing_is_written_for_another_fingerprint_or_a_no(known: Path, shown: str, accept: str | None) -> None:
    with pytest.raises(SparkserveError) as caught:
        meet(SETTINGS, accept, lambda question, flag: False)
    assert (caught.value.code, caught.value.exit_code) == ("host_key_refused", EXIT_COULD_NOT_LOOK)
    assert shown in caught.value.message
    assert not known.exists()


@pytest.mark.parametrize("word", ["yes", "SHA256:abc", "MD5:00:11", "A" * 43])
def test_a_word_that_is_no_fingerprint(known: Path, word: str) -> None:
    with pytest.raises(SparkserveError, match=f"{word} is no fingerprint") as caught:
        meet(SETTINGS, word, nobody)
    assert caught.value.exit_code == 2
    assert not known.exists()


def test_a_changed_key_is_no_question(client: Client, server: Sshd, tmp_path: Path, shown: str) -> None:
    other = Path(f"{make_key(tmp_path / 'other')}.pub")
    text = f"[127.0.0.1]:{server.port} {other.read_text()}"
    (tmp_path / "known_hosts").write_text(text)
    assert meet(SETTINGS, None, nobody) is None
    assert meet(SETTINGS, fingerprint(other), nobody) is None
    with pytest.raises(SparkserveError) as caught:
        meet(SETTINGS, shown, nobody)
    assert (caught.value.code, caught.value.exit_code) == ("host_key_changed", EXIT_COULD_NOT_LOOK)
    assert f"is known by {fingerprint(other)}, not by {shown}" in caught.value.message
    with pytest.raises(SparkserveError) as caught:
        client.connect()
    assert caught.value.code == "host_key_changed"
    assert shown in caught.value.message
    assert fingerprint(other) in caught.value.message
    assert (tmp_path / "known_hosts").read_text() == text


@pytest.mark.parametrize(
    ("options", "is_ours"),
    [
        ({"HostName": "127.0.0.1", "Port": "22"}, True),
        ({"HostName": "0.0.0.0", "Port": "2222"}, True),
        ({"HostName": "127.0.0.1", "Port": "22", "ProxyCommand": "nc %h %p"}, False),
        ({"HostName": "192.0.2.1", "Port": "22"}, False),
        ({"HostName": "no-such-machine.invalid", "Port": "22"}, False),
        ({}, False),
    ],
)
def test_this_machine_is_no_worker(client: Client, options: dict[str, str], is_ours: bool) -> None:
    client.set(**options)
    assert ssh.is_this_machine(ssh.resolve_target(SETTINGS)) is is_ours
    if is_ours:
        with pytest.raises(SparkserveError) as caught:
            meet(SETTINGS, None, nobody)
        assert (caught.value.code, caught.value.exit_code) == ("worker_is_head", 2)
        with pytest.raises(SparkserveError) as caught:  # as every command connects
            client.connect()
        assert caught.value.code == "worker_is_head"


@pytest.mark.parametrize("place", ["none", "/dev/null", "/proc/known_hosts"])
def test_a_known_hosts_that_cannot_be_kept(client: Client, place: str) -> None:
    client.set(UserKnownHostsFile=place)
    with pytest.raises(SparkserveError) as caught:
        meet(SETTINGS, None, lambda question, flag: True)
    assert caught.value.code == "known_hosts"
    assert not Path("none").exists()


def test_a_full_disk_leaves_the_file_as_it_was(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = offered_key(SETTINGS)
    assert key is not None
    known.parent.mkdir()
    known.write_text("# mine\n")
    real = os.fdopen

    class Full:
        def __init__(self, *words: object, **names: object) -> None:
            self._file = real(*words, **names)  # type: ignore[call-overload]

        def __getattr__(self, name: str) -> object:
            return getattr(self._file, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *words: object) -> None:
            self._file.close()

        def write(self, data: bytes) -> int:
            return int(self._file.write(data[:20]))

    monkeypatch.setattr(os, "fdopen", Full)
    with pytest.raises(SparkserveError, match="No space left"):
        trust(key)
    assert known.read_text() == "# mine\n"


def test_by_way_of_a_proxy(client: Client, known: Path, server: Sshd) -> None:
    client.set(HostName="192.0.2.1", HostKeyAlias="the-spark", HashKnownHosts="no")
    jump = "ssh -F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    client.set(ProxyCommand=f"{jump} -i {server.user_key} -W 127.0.0.1:{server.port} -p {server.port} 127.0.0.1")
    meet(SETTINGS, None, lambda question, flag: "the-spark (192.0.2.1)" in question)
    assert known.read_text().startswith("the-spark ssh-ed25519 ")
    client.connect().close()


def test_nobody_there(client: Client) -> None:
    client.set(Port="1", UserKnownHostsFile="/nonexistent")
    with pytest.raises(SparkserveError) as caught:
        offered_key(SETTINGS)
    assert caught.value.code == "ssh_unreachable"
