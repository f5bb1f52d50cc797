from __future__ import annotations

import concurrent.futures
import contextlib
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkserve import ssh
from sparkserve.cluster import NodeSession
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_NOT_READY, SparkserveError
from sparkserve.hosts import running, write_argv
from sparkserve.settings import Settings
from sparkserve.ssh_host import SshHost
from tests.unit.cases import wait_for
from tests.unit.sshd import USER, Client, Sshd, make_client, running_sshd
from tests.unit.test_hosts import MEGABYTES, WEIRD_WORDS, children


@pytest.fixture
def host(client: Client) -> Iterator[SshHost]:
    found = client.connect()
    yield found
    found.close()


@pytest.fixture
def user_host(client: Client) -> Iterator[SshHost]:
    client.set(User=USER)
    found = client.connect()
    yield found
    found.close()


@pytest.fixture
def short_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a directory for sockets, with a path that is short enough and a mode that is too wide."""
    with tempfile.TemporaryDirectory(dir="/tmp") as state:
        monkeypatch.setenv("XDG_STATE_HOME", state)
        sockets = Path(state) / "sparkserve" / "ssh"
        sockets.mkdir(parents=True)
        sockets.chmod(0o777)
        yield sockets


# -- commands ---------------------------------------------------------------------------------------------------------


def test_both_streams_and_the_code(host: SshHost) -> None:
    result = host.run(["sh", "-c", "echo out; echo err >&2; exit 3"], check=False)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    with pytest.raises(SparkserveError) as caught:
        host.run(["sh", "-c", "echo reason >&2; exit 9"])
    assert (caught.value.code, caught.value.node, caught.value.details) == ("command_failed", "worker", "reason")


def test_weird_words_arrive_unchanged(host: SshHost) -> None:
    answer = host.run(["printf", "%s\\0", *WEIRD_WORDS]).stdout
    assert answer == b"".join(word.encode() + b"\0" for word in WEIRD_WORDS)


def test_ten_megabytes_both_ways(host: SshHost) -> None:
    assert host.run(["cat"], stdin=MEGABYTES, timeout=60).stdout == MEGABYTES


def test_much_on_stderr_blocks_nothing(host: SshHost) -> None:
    result = host.run(["sh", "-c", "head -c 5000000 /dev/zero >&2; echo last >&2; cat"], stdin=b"in", timeout=30)
    assert (result.stdout, result.error_text[-4:]) == (b"in", "last")


def test_files(host: SshHost, tmp_path: Path) -> None:
    path = tmp_path / "a $(b) 'c'"
    host.write(path, MEGABYTES[:70_000], 0o600)
    assert host.read(path) == MEGABYTES[:70_000]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("stdin", [b"", MEGABYTES])
def test_timeout(host: SshHost, stdin: bytes) -> None:
    with pytest.raises(SparkserveError, match=r"gave no end within 0\.5 s") as caught:
        host.run(["sleep", "5"], stdin=stdin, timeout=0.5)
    assert (caught.value.code, caught.value.node) == ("command_timeout", "worker")
    assert host.run(["echo", "well"]).text == "well"


def test_timeout_ends_the_command_on_the_node_and_its_children(user_host: SshHost) -> None:
    seconds = f"95.{os.getpid()}"
    for script in (f"sleep {seconds} & wait", f"trap '' TERM; sleep {seconds}"):
        with pytest.raises(SparkserveError, match="gave no end"):
            user_host.run(["sh", "-c", script], timeout=0.3)
        wait_for(lambda: not children(seconds), "the child is gone")


def test_a_command_that_a_signal_ends_is_no_lost_connection(host: SshHost) -> None:
    assert host.run(["sh", "-c", "kill -9 $$"], check=False).exit_code != 0
    assert host.run(["true"]).exit_code == 0


def test_more_commands_at_once_than_sshd_takes_sessions(client: Client, server: Sshd) -> None:
    before = server.connections
    host = client.connect()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda n: host.run(["sh", "-c", "sleep 0.1; echo $0", str(n)]).text, range(12)))
    host.close()
    assert answers == [str(n) for n in range(12)]
    assert server.connections - before == 1


def test_the_node_program_and_commands_share_the_connection(client: Client, server: Sshd, tmp_path: Path) -> None:
    before = server.connections
    host = client.connect()
    session = NodeSession(host)
    assert session.ask("hello")["home"]
    session.ask("mkdir", paths=[str(tmp_path / "made")])
    assert host.run(["ls", str(tmp_path / "made")]).text == ""
    session.close()
    host.close()
    assert server.connections - before == 1


def test_a_node_without_python(host: SshHost) -> None:
    host.python = "python3-that-is-not-there"
    for _ in range(8):  # more often than there are sessions, whichever write it is that fails
        with pytest.raises(SparkserveError) as caught, contextlib.closing(NodeSession(host)) as session:
            session.ask("hello", timeout=60)
    assert (caught.value.code, caught.value.node, caught.value.exit_code) == (
        "python_missing",
        "worker",
        EXIT_NOT_READY,
    )


# -- a connection that ends -------------------------------------------------------------------------------------------


def test_a_connection_that_is_cut_in_the_middle_of_a_command(client: Client, server: Sshd) -> None:
    host = client.connect()
    threading.Timer(0.3, server.cut).start()
    with pytest.raises(SparkserveError) as caught:
        host.run(["sleep", "95"], timeout=60, check=False)
    assert (caught.value.code, caught.value.node, caught.value.exit_code) == (
        "connection_lost",
        "worker",
        EXIT_COULD_NOT_LOOK,
    )
    with pytest.raises(SparkserveError) as caught:
        host.run(["true"])
    assert caught.value.code == "connection_lost"
    host.close()


def test_a_connection_that_is_cut_in_the_middle_of_a_request(client: Client, server: Sshd) -> None:
    host = client.connect()
    session = NodeSession(host)
    session.ask("hello")
    threading.Timer(0.3, server.cut).start()
    with pytest.raises(SparkserveError) as caught:
        session.ask("facts", commands={"slow": ["sleep", "95"]}, timeout=60)
    assert (caught.value.code, caught.value.exit_code) == ("connection_lost", EXIT_COULD_NOT_LOOK)
    with pytest.raises(SparkserveError) as caught:
        session.ask("hello")
    assert caught.value.code == "connection_lost"
    host.close()


def test_a_connection_that_is_cut_in_the_middle_of_a_write(client: Client, server: Sshd, tmp_path: Path) -> None:
    host = client.connect()
    path = tmp_path / "f"
    path.write_bytes(b"old")
    with running(host, write_argv(path, 0o644, 1000)) as process:
        process.stdin.write(b"new")
        process.stdin.flush()
        wait_for((tmp_path / "f.sparkserve-new").exists, "the write has begun")
        server.cut()
        with pytest.raises(SparkserveError, match="SSH connection ended"):
            process.wait(60)
    host.close()
    assert path.read_bytes() == b"old"


def test_an_sshd_that_takes_few_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_sshd(tmp_path / "server", MaxSessions="1") as server:
        host = make_client(tmp_path, server, monkeypatch).connect()
        with running(host, ["cat"]):
            for _ in range(8):
                with pytest.raises(SparkserveError) as caught:
                    host.run(["true"])
                assert (caught.value.code, caught.value.node) == ("ssh_sessions", "worker")
        wait_for(lambda: runs(host), "the session of the first command is free again")
        host.close()


def runs(host: SshHost) -> bool:
    with contextlib.suppress(SparkserveError):
        return host.run(["echo", "well"]).text == "well"
    return False


def test_no_slot_is_lost_by_failures(client: Client, server: Sshd) -> None:
    client.set(User=USER)
    host = client.connect()
    for _ in range(10):
        host.run(["false"], check=False)
        with pytest.raises(SparkserveError):
            host.run(["sleep", "5"], timeout=0.01)
    assert host.run(["echo", "well"], timeout=60).text == "well"
    server.cut()
    for _ in range(10):
        with pytest.raises(SparkserveError):
            host.run(["true"], timeout=5)
    host.close()


# -- by way of others -------------------------------------------------------------------------------------------------


def test_a_proxy_command(client: Client, server: Sshd, tmp_path: Path) -> None:
    relay = tmp_path / "relay"
    relay.write_text(
        "#!/usr/bin/env python3\n"
        "import os, socket, sys, threading\n"
        "peer = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def back():\n"
        "    while data := peer.recv(65536):\n"
        "        os.write(1, data)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=back, daemon=True).start()\n"
        "while data := os.read(0, 65536):\n"
        "    peer.sendall(data)\n"
    )
    relay.chmod(0o755)
    client.set(ProxyCommand=f"{relay} %h %p")
    host = client.connect()
    assert host.run(["echo", "by proxy"]).text == "by proxy"
    host.close()


def test_bulk_data_finds_a_cipher_with_a_worker_that_has_none_of_the_fast_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_sshd(tmp_path / "server", Ciphers="aes256-ctr") as server:
        make_client(tmp_path, server, monkeypatch)
        argv = ssh.resolve_target(Settings(worker="spark")).bulk_command()
        answer = subprocess.run([*argv, "cat"], input=b"weights", capture_output=True, timeout=30, check=False)
    assert (answer.stdout, answer.stderr) == (b"weights", b"")


def test_bulk_data_takes_the_same_key_and_no_proxy(client: Client, server: Sshd) -> None:
    client.set(ProxyCommand="/nonexistent/proxy %h %p")
    target = ssh.resolve_target(Settings(worker="spark"))
    argv = target.bulk_command("127.0.0.1")
    answer = subprocess.run([*argv, "cat"], input=MEGABYTES, capture_output=True, timeout=30, check=False)
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert answer.stdout == MEGABYTES


def test_streams_share_a_login(short_state: Path, client: Client) -> None:
    host = client.connect()

    def connection(login: str) -> str:
        argv = host.bulk_argv(["printenv", "SSH_CONNECTION"], "", login)
        # Whoever holds the login keeps our stderr: reading that to its end would wait for the login's own end.
        return subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout

    one, other = host.take_login(), host.take_login()
    found = [connection(login) for login in (one, one, other, "")]
    assert found[0] == found[1]
    assert len({*found}) == 3
    host.give_login_back(other)
    assert host.take_login() == other
    assert Path(one).is_socket()
    host.close()
    wait_for(lambda: not list(short_state.iterdir()), "the logins have ended")


@pytest.mark.parametrize(
    "options",
    [{"RemoteCommand": "true"}, {"RequestTTY": "force"}, {"PermitLocalCommand": "yes", "LocalCommand": "echo hello"}],
)
def test_bulk_data_is_not_touched_by_what_a_person_wants_of_a_login(client: Client, options: dict[str, str]) -> None:
    client.set(**options)
    argv, data = ssh.resolve_target(Settings(worker="spark")).bulk_command(), b"a\nb\x04\x03c"
    answer = subprocess.run([*argv, "cat"], input=data, capture_output=True, timeout=30, check=False)
    assert (answer.stdout, answer.stderr) == (data, b"")


def test_a_login_is_as_gentle_as_the_thread_that_made_it(short_state: Path, client: Client) -> None:
    host = client.connect()
    login = host.take_login()
    host.give_login_back(login)
    with concurrent.futures.ThreadPoolExecutor(1, initializer=os.nice, initargs=(1,)) as gentle:
        assert gentle.submit(host.take_login).result() != login
    assert host.take_login() == login
    assert short_state.stat().st_mode & 0o777 == 0o700
    host.close()


def test_logins_that_do_not_come_back_are_made_no_more(short_state: Path, client: Client) -> None:
    host = client.connect()
    logins = [host.take_login() for _ in range(50)]
    assert 6 <= len({*logins} - {""}) <= 20
    assert not list(short_state.iterdir())
    host.close()


def test_no_login_is_shared_in_a_directory_that_is_not_ours(client: Client) -> None:
    host = client.connect()
    other = SshHost("worker", host.target, host.client, Path("/proc/self/task"))
    assert other.take_login() == ""
    host.close()


def test_no_login_is_shared_by_too_long_a_name(client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("n" * 80)))
    host = client.connect()
    assert host.take_login() == ""
    host.close()
