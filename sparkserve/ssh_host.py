"""A machine over one SSH connection; the single place where words become a shell line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from sparkserve.errors import SparkserveError
from sparkserve.hosts import Collector, Host, Process, connection_lost

if TYPE_CHECKING:
    import paramiko

    from sparkserve.ssh import SshTarget

# An sshd takes ten sessions on one connection by default; four stay for the Docker client and the node program.
_SESSIONS = 6
# One that does not come back has failed: where so many have, as on a file system without sockets, no more are made.
_MOST_LOGINS = 12
_CLOSED = io.BytesIO()
_CLOSED.close()
# A socket's path has at most 107 bytes, of which ssh takes 17 for itself while it makes one; it expands the others.
_SOCKET_PATH = re.compile(r"[A-Za-z0-9_/.@+-]{1,90}")


class SshProcess:
    """A command on one channel of the control connection."""

    def __init__(self, node: str, channel: paramiko.Channel, slot: threading.Semaphore) -> None:
        self._node = node
        self._channel = channel
        self._slot: threading.Semaphore | None = slot
        channel.shutdown_write = self._end_input  # type: ignore[method-assign]  # what closing stdin calls
        # paramiko's files are file-like without being typed as such
        self.stdin: IO[bytes] = cast("Any", channel.makefile_stdin("wb"))
        self.stdout: IO[bytes] = cast("Any", channel.makefile("rb"))
        self._errors = Collector(cast("Any", channel.makefile_stderr("rb")))

    def wait(self, timeout: float | None = None) -> int:
        """See `Process`."""
        if not self._channel.status_event.wait(timeout):
            raise TimeoutError
        code = self._channel.recv_exit_status()
        # No code: a signal ended the command, unless the whole connection is gone and nothing is known of it.
        if code == -1 and not self._channel.get_transport().is_active():
            raise connection_lost(self._node, self.error_text())
        return code

    def error_text(self) -> str:
        """See `Process`."""
        return self._errors.text()

    def close(self) -> None:
        """See `Process`."""
        # sshd keeps a command, and its session, when only the channel is closed: the command itself must be ended.
        # It takes no signals for root's own sessions; there only the end of its input is left to end a command.
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()
        for name, seconds in (("TERM", 0.5), ("KILL", 0.5)):
            if not self._channel.status_event.is_set():
                self._send_signal(name)
                self._channel.status_event.wait(seconds)
        self._channel.close()
        # A file of paramiko's that the garbage collector finds in a circle prints a traceback: let go of both here.
        self.stdin = self.stdout = _CLOSED
        if self._slot is not None:
            self._slot.release()
            self._slot = None

    def _end_input(self) -> None:
        """Tell the end of stdin, in paramiko's words but in order with the answer to the command's own end."""
        channel: Any = self._channel
        with channel.lock:
            self._send_in_order(channel._send_eof())

    def _send_in_order(self, message: paramiko.Message | None) -> None:
        """Send while the lock is held: what comes after our close of the channel makes sshd cut the connection."""
        if message is not None and not self._channel.closed:
            transport: Any = self._channel.get_transport()
            transport._send_user_message(message)

    def _send_signal(self, name: str) -> None:
        """Send a signal to the command's process group (RFC 4254, 6.9), for which paramiko has no call of its own."""
        import paramiko

        message = paramiko.Message()
        message.add_byte(paramiko.common.cMSG_CHANNEL_REQUEST)
        message.add_int(self._channel.remote_chanid)
        message.add_string("signal")
        message.add_boolean(False)  # noqa: FBT003 - no reply is wanted
        message.add_string(name)
        # A lost connection ends the command as well.
        with contextlib.suppress(paramiko.SSHException, OSError, EOFError), self._channel.lock:
            self._send_in_order(message)


class SshHost(Host):
    """A machine over one SSH connection; many commands share it, each on a channel of its own."""

    def __init__(self, name: str, target: SshTarget, client: paramiko.SSHClient, sockets: Path) -> None:
        super().__init__(name)
        self.target = target
        self.client = client
        self._sockets = sockets
        self._slots = threading.Semaphore(_SESSIONS)
        self._lock = threading.Lock()
        self._logins: list[str] = []
        self._free_logins: defaultdict[int, list[str]] = defaultdict(list)

    def open(self, argv: Sequence[str]) -> Process:
        """See `Host`."""
        import paramiko

        self._slots.acquire()
        try:
            transport = self.client.get_transport()
            if transport is None or not transport.is_active():
                raise connection_lost(self.name)
            channel = transport.open_session(timeout=20)
            # SSH carries one string for the remote shell: this is the single place where words become a line.
            # The shell gives way to the command, so that a signal reaches the command itself.
            channel.exec_command(f"exec {shlex.join(argv)}")
            return SshProcess(self.name, channel, self._slots)
        except BaseException as error:
            self._slots.release()
            if isinstance(error, paramiko.ChannelException):
                message = "sshd opens no further session on this connection"
                hint = "MaxSessions in the node's sshd_config should be 10, its default, or more"
                raise SparkserveError("ssh_sessions", message, hint, self.name, str(error)) from error
            if isinstance(error, (paramiko.SSHException, OSError, EOFError)):
                raise connection_lost(self.name, str(error)) from error
            raise

    def bulk_argv(self, argv: Sequence[str], link_address: str, login: str = "") -> list[str]:
        """See `Host`: an OpenSSH process, over the link address if one is named."""
        return [*self.target.bulk_command(link_address, login), shlex.join(argv)]

    def take_login(self) -> str:
        """See `Host`: a login takes as long as 60 MiB, and a process of its own encrypts what goes through it."""
        with self._lock:
            if free := self._free_logins[_niceness()]:
                return free.pop()
            path = str(self._sockets / f"{os.getpid()}-{len(self._logins)}")
            try:
                self._sockets.mkdir(parents=True, exist_ok=True)
                self._sockets.chmod(0o700)  # fails also where it is another's or cannot be written to
            except OSError:
                return ""
            if len(self._logins) == _MOST_LOGINS or not _SOCKET_PATH.fullmatch(path):
                return ""
            self._logins.append(path)
            return path

    def give_login_back(self, login: str) -> None:
        """See `Host`."""
        if login:
            with self._lock:
                self._free_logins[_niceness()].append(login)

    def close(self) -> None:
        """See `Host`; logins also end by themselves a few seconds after their last use."""
        for login in self._logins:
            argv = ["ssh", "-F", "none", "-o", f"ControlPath={login}", "-O", "exit", self.name]
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(argv, stderr=subprocess.DEVNULL, timeout=5, check=False)
        self.client.close()


def _niceness() -> int:
    """Tell how gentle this thread is: so is the process that encrypts for it, whatever begins to serve later."""
    return os.getpriority(os.PRIO_PROCESS, 0)
