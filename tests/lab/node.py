"""One node of a running lab, as a test sees it: commands inside it, its daemons, and its scratch figures."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tests.lab import furnish
from tests.lab.machine import LabError, processes_named, wait_until
from tests.lab.network import ROLES, Role
from tests.lab.scratch import read_meminfo, write_meminfo
from tests.lab.state import State

ENTER = Path(__file__).with_name("enter.py")
LOGS = "/var/log/lab"
SSHD = {"sshd", "sshd-session", "sshd-auth"}


@dataclass(frozen=True)
class LabNode:
    """A node; the object stays good over `down` and `up`."""

    user: ClassVar[str] = furnish.USER
    uid: ClassVar[int] = furnish.UID
    home: ClassVar[str] = str(furnish.HOME)
    password: ClassVar[str] = furnish.PASSWORD

    name: str
    hostname: str
    folder: Path  # the lab's own folder on the machine
    control_group: str

    @property
    def role(self) -> Role:
        """What sets this node apart from the other."""
        return ROLES[self.name]

    @property
    def files(self) -> Path:
        """Where the machine keeps this node's disks and logs."""
        return self.folder / "nodes" / self.name

    @property
    def pid(self) -> int:
        """The node's first process, as the machine numbers it."""
        return State.of_running(self.folder).nodes[self.name].pid

    @property
    def root(self) -> Path:
        """The node's root as seen from the machine; absolute links in it lead to the machine's files."""
        return Path(f"/proc/{self.pid}/root")

    @property
    def management_address(self) -> str:
        """Address on the management network."""
        return State.of_running(self.folder).subnets.addresses(self.role)[0]

    @property
    def link_address(self) -> str:
        """Address on the cable."""
        return State.of_running(self.folder).subnets.addresses(self.role)[1]

    @property
    def twin_address(self) -> str:
        """Address on the second function of the cabled port."""
        return State.of_running(self.folder).subnets.addresses(self.role)[2]

    @property
    def management_interface(self) -> str:
        """Interface of the management network."""
        return self.role.management_interface

    @property
    def link_interface(self) -> str:
        """Interface of the cable."""
        return self.role.ports[0].interface

    @property
    def twin_interface(self) -> str:
        """Interface of the second function of the cabled port."""
        return self.role.ports[1].interface

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        user: str = furnish.USER,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run a command inside the node, in the user's home, with nothing of the caller's environment."""
        done = subprocess.run(
            self._entering(argv, user), input=stdin or b"", env=dict(env or {}), timeout=timeout, capture_output=True,
            check=False,
        )  # fmt: skip
        if check and done.returncode != 0:
            error = subprocess.CalledProcessError(done.returncode, list(argv), done.stdout, done.stderr)
            error.add_note(f"on {self.name}: {(done.stderr or done.stdout).decode(errors='replace').strip()}")
            raise error
        return done

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        user: str = furnish.USER,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[bytes]:
        """Start a command inside the node; signals sent to the process reach the command."""
        return subprocess.Popen(self._entering(argv, user), env=dict(env or {}), **options)

    def docker(self, *arguments: str, timeout: float = 120) -> str:
        """Call the node's docker client as its owner and return what it printed."""
        return self.run(["docker", *arguments], timeout=timeout).stdout.decode().strip()

    def start_sshd(self) -> None:
        """Start the SSH server."""
        if not self._running("/run/sshd.pid"):
            self.run(["/usr/sbin/sshd", "-E", f"{LOGS}/sshd.log"], user="root")
        wait_until(self._answers_ssh, f"sshd on {self.name}", 60)

    def stop_sshd(self) -> None:
        """End the SSH server and every session."""
        self._signal_sshd(signal.SIGCONT)
        self._signal_sshd(signal.SIGKILL)
        wait_until(lambda: not processes_named(SSHD, self.pid), f"end of sshd on {self.name}", 60)
        self.run(["rm", "-f", "/run/sshd.pid"], user="root")

    def pause_sshd(self) -> None:
        """Freeze the SSH server with all sessions: connections open and nothing answers."""
        self._signal_sshd(signal.SIGSTOP)

    def resume_sshd(self) -> None:
        """Let the SSH server go on."""
        self._signal_sshd(signal.SIGCONT)

    def start_docker(self) -> None:
        """Start the Docker engine and wait until it answers."""
        self.launch_docker()
        self.wait_docker()

    def launch_docker(self) -> None:
        """Start the Docker engine without waiting."""
        if not self._running("/run/docker.pid"):
            argv = ["dockerd", "--storage-driver", "overlay2", "--exec-opt", "native.cgroupdriver=cgroupfs"]
            argv += ["--cgroup-parent", f"/{self.control_group}", "--group", "docker"]
            self.launch_daemon("dockerd", argv)

    def wait_docker(self) -> None:
        """Wait until the Docker engine answers."""
        answers = ["docker", "version", "--format", "{{.Server.Version}}"]
        wait_until(lambda: self.run(answers, check=False).returncode == 0, f"dockerd on {self.name}", 60)

    def stop_docker(self) -> None:
        """End the Docker engine in order, and its containers with it, as a reboot would."""
        pid_file = "/run/docker.pid"
        if self._running(pid_file):
            self.run(["sh", "-c", f"kill $(cat {pid_file})"], user="root")
        wait_until(lambda: not self._running(pid_file), f"end of dockerd on {self.name}", 60)

    def launch_daemon(self, name: str, argv: Sequence[str | Path]) -> None:
        """Start a daemon as root, with its output in a log that the machine can read under `files`/log."""
        subprocess.run(self._entering(argv, "root", f"{LOGS}/{name}.log"), env={}, check=True)

    def read_meminfo(self) -> dict[str, int]:
        """Read the node's memory figures."""
        return read_meminfo(self.files / "lab/meminfo")

    def set_meminfo(self, **kib: int) -> None:
        """Change some of the node's memory figures."""
        values = self.read_meminfo()
        unknown = kib.keys() - values.keys()
        if unknown:
            raise LabError(f"no such memory figures: {', '.join(sorted(unknown))}")
        write_meminfo(self.files / "lab/meminfo", {**values, **kib})

    def _entering(self, argv: Sequence[str | Path], user: str, log: str = "-") -> list[str]:
        return [sys.executable, "-I", "-S", str(ENTER), str(self.pid), user, log, *map(str, argv)]

    def _signal_sshd(self, number: signal.Signals) -> None:
        for pid in processes_named(SSHD, self.pid):
            with contextlib.suppress(ProcessLookupError):  # a session that ended by itself
                os.kill(pid, number)

    def _running(self, pid_file: str) -> bool:
        return self.run(["sh", "-c", f"kill -0 $(cat {pid_file})"], user="root", check=False).returncode == 0

    def _answers_ssh(self) -> bool:
        try:
            with socket.create_connection((self.management_address, 22), timeout=1):
                return True
        except OSError:
            return False
