from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkserve import ssh
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError
from tests.unit.cases import free_port
from tests.unit.sshd import Client, Sshd, fingerprint, make_key


def refusal(client: Client) -> SparkserveError:
    with pytest.raises(SparkserveError) as caught:
        client.connect()
    assert (caught.value.node, caught.value.exit_code) == ("worker", EXIT_COULD_NOT_LOOK)
    return caught.value


def test_an_unknown_host_key(client: Client, server: Sshd, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").write_text("")
    error = refusal(client)
    assert error.code == "host_key_unknown"
    assert fingerprint(Path(f"{server.host_key}.pub")) in error.message
    assert f"[127.0.0.1]:{server.port} is not in known_hosts; it shows the ssh-ed25519 key" in error.message
    assert (tmp_path / "known_hosts").read_text() == ""


def test_a_changed_host_key(client: Client, server: Sshd, tmp_path: Path) -> None:
    other = make_key(tmp_path / "other")
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {Path(f'{other}.pub').read_text()}")
    error = refusal(client)
    assert error.code == "host_key_changed"
    assert fingerprint(Path(f"{other}.pub")) in error.message
    assert fingerprint(Path(f"{server.host_key}.pub")) in error.message
    assert f"ssh-keygen -R '[127.0.0.1]:{server.port}'" in error.hint


def test_known_hosts_may_be_hashed_and_name_an_alias(client: Client, server: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    known.write_text(f"the-spark {Path(f'{server.host_key}.pub').read_text()}")
    client.set(HostKeyAlias="the-spark")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, capture_output=True)
    assert "the-spark" not in known.read_text()
    client.connect().close()


def test_the_other_known_hosts_file_counts_too(client: Client, tmp_path: Path) -> None:
    (tmp_path / "known_hosts").rename(tmp_path / "second")
    client.set(UserKnownHostsFile=f"{tmp_path}/none {tmp_path}/second")
    client.connect().close()


def test_a_key_that_the_worker_does_not_take(client: Client, tmp_path: Path) -> None:
    client.set(IdentityFile=str(make_key(tmp_path / "stranger")))
    error = refusal(client)
    assert (error.code, str(tmp_path / "stranger") in error.message) == ("ssh_auth", True)
    assert error.hint.startswith(f"ssh-copy-id -p {client.options['Port']} ")


def test_no_key_at_all(client: Client) -> None:
    client.set(IdentityFile="none")
    error = refusal(client)
    assert (error.code, "no key file" in error.message) == ("ssh_auth", True)


def test_a_key_with_a_passphrase_needs_the_agent(client: Client, tmp_path: Path) -> None:
    client.set(IdentityFile=str(make_key(tmp_path / "locked", passphrase="secret words")))
    error = refusal(client)
    assert (error.code, "ssh-add" in error.hint) == ("ssh_auth", True)


@pytest.mark.parametrize(
    "content", ["no key", "", "-----BEGIN OPENSSH PRIVATE KEY-----\nAAAA\n-----END OPENSSH PRIVATE KEY-----\n"]
)
def test_a_key_file_that_holds_no_key(client: Client, tmp_path: Path, content: str) -> None:
    (tmp_path / "broken").write_text(content)
    client.set(IdentityFile=str(tmp_path / "broken"))
    error = refusal(client)
    assert (error.code, str(tmp_path / "broken") in error.message) == ("ssh_auth", True)


def test_a_port_where_nothing_listens(client: Client) -> None:
    port = free_port()
    client.set(Port=str(port))
    error = refusal(client)
    assert (error.code, error.message) == ("ssh_unreachable", f"cannot reach 127.0.0.1 port {port}: Connection refused")


@contextlib.contextmanager
def listener(greeting: bytes | None = None, *, backlog: int = 8) -> Iterator[int]:
    """Listen on loopback; greet and hang up, or say nothing at all."""
    held = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(backlog)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if greeting is not None:
                        connection.sendall(greeting)
                        connection.close()

        if backlog:
            threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


@pytest.mark.parametrize("greeting", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_listener_that_does_not_speak_ssh(
    client: Client, monkeypatch: pytest.MonkeyPatch, greeting: bytes | None
) -> None:
    monkeypatch.setattr(ssh, "CONNECT_SECONDS", 0.5)
    with listener(greeting) as port:
        client.set(Port=str(port))
        error = refusal(client)
    assert error.code == "ssh_banner"
    assert "out of memory" in error.hint


def test_a_banner_that_comes_late_is_waited_for(client: Client, server: Sshd) -> None:
    late = ssh.CONNECT_SECONDS / 4
    with server.paused() as resume:
        begun = time.monotonic()
        timer = threading.Timer(late, resume)
        timer.start()
        with contextlib.closing(client.connect()) as host:
            assert time.monotonic() - begun >= late
            assert host.run(["echo", "well"]).stdout == b"well\n"
        timer.join()


def test_a_banner_that_comes_too_late_is_a_machine_that_has_no_time(
    client: Client, server: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.paused(), monkeypatch.context() as patch:
        patch.setattr(ssh, "CONNECT_SECONDS", 0.5)
        begun = time.monotonic()
        error = refusal(client)
        waited = time.monotonic() - begun
    assert (error.code, error.exit_code, waited >= 0.5) == ("ssh_banner", EXIT_COULD_NOT_LOOK, True)
    assert error.hint == "the machine may be out of memory or overloaded: wait a minute, then look again"
    with contextlib.closing(client.connect()) as host:  # a minute later
        assert host.run(["echo", "well"]).stdout == b"well\n"


def test_a_machine_that_does_not_answer(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "CONNECT_SECONDS", 0.3)
    with listener(backlog=0) as port, contextlib.ExitStack() as stack:
        for _ in range(3):  # a full backlog drops what comes: nobody answers any more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        client.set(Port=str(port))
        error = refusal(client)
    assert (error.code, error.message) == ("ssh_timeout", f"no answer from 127.0.0.1 port {port} within 0.3 s")


def test_more_keys_than_the_worker_lets_be_tried(client: Client, tmp_path: Path) -> None:
    right = client.options["IdentityFile"]
    wrong = [str(make_key(tmp_path / f"stranger{number}")) for number in range(7)]
    client.set(IdentityFile=f"{wrong[0]}\n" + "".join(f"IdentityFile {name}\n" for name in [*wrong[1:], right]))
    error = refusal(client)
    assert (error.code, "hung up while keys were offered" in error.message) == ("ssh_auth", True)
    assert "SPARKSERVE_SSH_KEY" in error.hint
