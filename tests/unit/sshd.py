"""A real sshd on loopback with keys of its own, and an `ssh` that reads the test's configuration only."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from sparkserve import ssh
from sparkserve.settings import Settings
from sparkserve.ssh_host import SshHost
from tests.unit.cases import free_port, wait_for

SSHD = "/usr/sbin/sshd"
USER = "spark-tester" if os.getuid() == 0 else getpass.getuser()
# sshd of root wants /run/sshd, which only a started service makes, and root's own sessions are not like a user's:
# in a mount namespace that nobody else sees there are the directory, a user, and a root with a plain shell.
NAMESPACE = f"""set -e; mount -t tmpfs tmpfs /run; mkdir -m 755 /run/sshd
cp "$1" /run/keys; sed '/^root:/s#[^:]*$#/bin/sh#' /etc/passwd > /run/passwd
echo '{USER}:*:1500:1500::/run:/bin/sh' >> /run/passwd
chmod 644 /run/keys /run/passwd; mount --bind /run/passwd /etc/passwd; shift; exec "$@\""""


def make_key(path: Path, *, passphrase: str = "", kind: str = "ed25519") -> Path:
    argv = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", str(path)]
    subprocess.run(argv, check=True, timeout=20)
    return path


def fingerprint(public_key: Path) -> str:
    """Give a key's fingerprint as OpenSSH itself prints it."""
    answer = subprocess.run(["ssh-keygen", "-lf", str(public_key)], capture_output=True, text=True, check=True)
    return answer.stdout.split()[1]


def put_first_on_path(directory: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of the test before the real one."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(script)
    (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


@dataclass
class Client:
    """How the test's user reaches sshd: the options of its `Host spark` block."""

    directory: Path
    options: dict[str, str] = field(default_factory=dict)

    def set(self, **options: str) -> None:
        self.options |= options
        lines = [f"  {name} {value}" for name, value in self.options.items()]
        (self.directory / "config").write_text("\n".join(["Host spark", *lines, ""]))

    def connect(self) -> SshHost:
        return ssh.connect(Settings(worker="spark"))


class Sshd:
    """The server: its port, its log, its processes."""

    def __init__(self, directory: Path, options: dict[str, str]) -> None:
        self.directory = directory
        self.port = free_port()
        self.host_key = make_key(directory / "host")
        self.log = directory / "log"
        self.user_key = make_key(directory / "user")
        authorized = Path(f"{self.user_key}.pub")
        config = {
            "Port": str(self.port),
            "ListenAddress": "127.0.0.1",
            "HostKey": str(self.host_key),
            "PidFile": "none",
            "AuthorizedKeysFile": f"{authorized} /run/keys",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "PermitRootLogin": "yes",
            "LogLevel": "VERBOSE",
            **options,
        }
        (directory / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in config.items()))
        argv = [SSHD, "-D", "-e", "-f", str(directory / "sshd_config")]
        if os.getuid() == 0:
            argv = ["unshare", "--mount", "sh", "-c", NAMESPACE, "sh", str(authorized), *argv]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(lambda: "Server listening" in self.log.read_text(), "sshd listens")

    @property
    def connections(self) -> int:
        return self.log.read_text().count("Connection from 127.0.0.1")

    def sessions(self) -> list[int]:
        """List the processes below the listener."""
        return descendants(self._process.pid)

    @contextlib.contextmanager
    def paused(self) -> Iterator[Callable[[], None]]:
        """Let nobody be greeted, as on a machine that has no time; the kernel still takes connections."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield partial(self._process.send_signal, signal.SIGCONT)
        finally:
            self._process.send_signal(signal.SIGCONT)

    def cut(self) -> None:
        """Kill every session at once, as a machine that dies does."""
        for pid in self.sessions():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.cut()
        self._process.terminate()
        self._process.wait(60)


def descendants(pid: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(entry.parent.name))
    found, pending = [], [pid]
    while pending:
        children = parents.get(pending.pop(), [])
        found += children
        pending += children
    return found


@contextlib.contextmanager
def running_sshd(directory: Path, **options: str) -> Iterator[Sshd]:
    directory.mkdir()
    server = Sshd(directory, options)
    try:
        yield server
    finally:
        server.close()


def make_client(directory: Path, server: Sshd, monkeypatch: pytest.MonkeyPatch) -> Client:
    """Make a user with a key that sshd accepts and a known_hosts that holds its host key."""
    home = directory / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    real = shutil.which("ssh")
    script = f'#!/bin/sh\nexec {real} -F {directory}/config "$@"\n'
    put_first_on_path(directory / "bin", "ssh", script, monkeypatch)
    known = directory / "known_hosts"
    known.write_text(f"[127.0.0.1]:{server.port} {Path(f'{server.host_key}.pub').read_text()}")
    client = Client(directory)
    client.set(
        HostName="127.0.0.1",
        Port=str(server.port),
        User=getpass.getuser(),
        IdentityFile=str(server.user_key),
        UserKnownHostsFile=str(known),
        GlobalKnownHostsFile="/dev/null",
    )
    return client
