"""A machine seen as run, read, write: the local one or one over SSH; quoting and masking live here only."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from pydantic import SecretStr

from sparkserve.errors import SparkserveError

if TYPE_CHECKING:
    import paramiko

    from sparkserve.ssh import SshTarget

log = logging.getLogger("sparkserve.hosts")

# An sshd takes ten sessions on one connection by default; four stay for the Docker client and the node program.
_SESSIONS = 6
# A constant script; path and mode arrive as its arguments, the content on stdin. The rename makes it all or nothing.
# A cut connection ends stdin too: only a file of the whole size may take its name.
_WRITE_SCRIPT = """set -e; t="$1.sparkserve-new"; (umask 077; cat > "$t")
[ "$(wc -c < "$t")" -eq "$3" ]; chmod -- "$2" "$t"; sync -- "$t"; mv -fT -- "$t" "$1\""""


@dataclass(frozen=True)
class CommandResult:
    """What a command left: exit code and both streams."""

    argv: tuple[str, ...]
    exit_code: int
    stdout: bytes
    stderr: bytes

    @property
    def text(self) -> str:
        """Standard output as text without the closing newline."""
        return self.stdout.decode(errors="replace").rstrip("\n")

    @property
    def error_text(self) -> str:
        """The last lines of standard error, for a person."""
        return "\n".join(self.stderr.decode(errors="replace").strip().splitlines()[-15:])


class Process(Protocol):
    """A command that runs: its three streams, its end."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and give the exit code; raise TimeoutError when `timeout` seconds pass."""
        ...

    def error_text(self) -> str:
        """Give what standard error said so far."""
        ...

    def close(self) -> None:
        """End it if it still runs, and free its streams."""
        ...


class Host(ABC):
    """The whole surface between us and a machine; a subclass only knows how to open a process there."""

    python = "python3"

    def __init__(self, name: str) -> None:
        self.name = name
        self.sudo_password: SecretStr | None = None

    @abstractmethod
    def open(self, argv: Sequence[str]) -> Process:
        """Start `argv` (never a shell line) on the machine."""

    @abstractmethod
    def close(self) -> None:
        """Give the connection back."""

    def bulk_argv(self, argv: Sequence[str], link_address: str) -> list[str]:  # noqa: ARG002 - for those that are far
        """Give the command of this machine that runs `argv` there with pipes of its own, for bulk data."""
        return list(argv)

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0, check: bool = True
    ) -> CommandResult:
        """Run `argv` to its end within `timeout` seconds; a non-zero exit raises unless `check` is off."""
        log.debug("%s: %s", self.name, shlex.join(argv))
        deadline = time.monotonic() + timeout
        process = self.open(argv)
        try:
            output = _exchange(process, stdin, timeout)
            code = process.wait(max(0.1, deadline - time.monotonic()))
            result = CommandResult(tuple(argv), code, output, process.error_text().encode())
        except TimeoutError as error:
            message = f"`{shlex.join(argv)}` gave no end within {timeout:g} s"
            raise SparkserveError("command_timeout", message, node=self.name) from error
        finally:
            process.close()
        log.debug("%s: exit %d", self.name, result.exit_code)
        if check and result.exit_code != 0:
            raise SparkserveError(
                "command_failed",
                f"`{shlex.join(argv)}` failed with exit code {result.exit_code}",
                node=self.name,
                details=result.error_text or result.text[-2000:],
            )
        return result

    def read(self, path: str | Path) -> bytes:
        """Read a file."""
        return self.run(["cat", "--", str(path)]).stdout

    def write(self, path: str | Path, content: bytes, mode: int = 0o644) -> None:
        """Write a file beside its goal and rename it, so that nobody meets half of it."""
        self.run(write_argv(path, mode, len(content)), stdin=content)

    def asks_sudo_password(self) -> bool:
        """Whether sudo wants a password here; root is not asked."""
        return not self.is_root() and self.run(["sudo", "-n", "--", "true"], check=False).exit_code != 0

    def is_root(self) -> bool:
        """Whether we are root on the machine."""
        return self.run(["id", "-u"]).text == "0"

    def sudo(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> CommandResult:
        """Run `argv` as root: directly, or by sudo without a password, or with the password we were given."""
        if self.is_root():
            return self.run(argv, stdin=stdin, timeout=timeout)
        if not self.asks_sudo_password():
            return self.run(["sudo", "-n", "--", *argv], stdin=stdin, timeout=timeout)
        if self.sudo_password is None:
            raise sudo_needs_password(self.name)
        line = self.sudo_password.get_secret_value().encode() + b"\n"
        # `-k` makes sudo read the password also when it remembers an earlier one, so that stdin is always as expected.
        return self.run(["sudo", "-k", "-S", "-p", "", "--", *argv], stdin=line + stdin, timeout=timeout)


def write_argv(path: str | Path, mode: int, size: int) -> list[str]:
    """Give the command that makes a file of `size` bytes from its standard input, all or nothing."""
    return ["sh", "-c", _WRITE_SCRIPT, "sh", str(path), f"{mode:o}", str(size)]


def sudo_needs_password(node: str) -> SparkserveError:
    """Say that sudo asks for a password that we do not have."""
    return SparkserveError(
        "sudo_password",
        "sudo asks for a password and none was given",
        "run `sparkserve tune` on a terminal, or set SPARKSERVE_SUDO_PASSWORD_FILE to a file of mode 0600",
        node,
        exit_code=3,
    )


def _exchange(process: Process, stdin: bytes, timeout: float) -> bytes:
    """Feed stdin and collect stdout side by side, so that neither side's buffer can block the other."""
    chunks: list[bytes] = []

    def collect() -> None:
        with contextlib.suppress(OSError, ValueError):  # the stream was closed under us: `wait` tells why
            while chunk := process.stdout.read(65536):
                chunks.append(chunk)

    def feed() -> None:
        with contextlib.suppress(OSError, ValueError):  # a command may end without reading its input
            process.stdin.write(stdin)
            process.stdin.flush()
        with contextlib.suppress(OSError, ValueError):
            process.stdin.close()

    deadline = time.monotonic() + timeout
    threads = [threading.Thread(target=target, daemon=True) for target in (collect, feed)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if threads[0].is_alive():
        raise TimeoutError
    return b"".join(chunks)


class _Collector:
    """Keeps the last part of a stream while it flows."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._tail = b""
        self._thread = threading.Thread(target=self._follow, args=(stream,), daemon=True)
        self._thread.start()

    def _follow(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            while chunk := stream.read1(65536) if hasattr(stream, "read1") else stream.read(4096):
                self._tail = (self._tail + chunk)[-65536:]

    def text(self, wait: float = 1.0) -> str:
        self._thread.join(wait)
        return self._tail.decode(errors="replace")


class LocalProcess:
    """A command on this machine, in a process group of its own so that Ctrl-C reaches it through us only."""

    def __init__(self, argv: Sequence[str], name: str) -> None:
        try:
            self._popen = subprocess.Popen(
                list(argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            message = f"cannot run `{argv[0]}`: {error.strerror}"
            raise SparkserveError("tool_missing", message, f"install {Path(argv[0]).name}", name) from error
        if not (self._popen.stdin and self._popen.stdout and self._popen.stderr):
            raise AssertionError("Popen was asked for pipes")
        self.stdin, self.stdout = self._popen.stdin, self._popen.stdout
        self._stderr = self._popen.stderr
        self._errors = _Collector(self._stderr)

    def wait(self, timeout: float | None = None) -> int:
        """See `Process`."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error

    def error_text(self) -> str:
        """See `Process`."""
        return self._errors.text()

    def close(self) -> None:
        """See `Process`."""
        if self._popen.poll() is None:
            # Its whole group: a child that held our pipe open would keep its reader waiting.
            os.killpg(self._popen.pid, signal.SIGTERM)
            try:
                self._popen.wait(2)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        for stream in (self.stdin, self.stdout, self._stderr):
            with contextlib.suppress(OSError):
                stream.close()


class LocalHost(Host):
    """The machine on which the command was typed."""

    python = sys.executable

    def open(self, argv: Sequence[str]) -> Process:
        """See `Host`."""
        return LocalProcess(argv, self.name)

    def close(self) -> None:
        """See `Host`."""


class SshProcess:
    """A command on one channel of the control connection."""

    def __init__(self, node: str, channel: paramiko.Channel, slot: threading.Semaphore) -> None:
        self._node = node
        self._channel = channel
        self._slot: threading.Semaphore | None = slot
        # paramiko's files are file-like without being typed as such
        self.stdin: IO[bytes] = cast("Any", channel.makefile_stdin("wb"))
        self.stdout: IO[bytes] = cast("Any", channel.makefile("rb"))
        self._errors = _Collector(cast("Any", channel.makefile_stderr("rb")))

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
        if self._slot is not None:
            self._slot.release()
            self._slot = None

    def _send_signal(self, name: str) -> None:
        """Send a signal to the command's process group (RFC 4254, 6.9), for which paramiko has no call of its own."""
        import paramiko

        transport: Any = self._channel.get_transport()
        message = paramiko.Message()
        message.add_byte(paramiko.common.cMSG_CHANNEL_REQUEST)
        message.add_int(self._channel.remote_chanid)
        message.add_string("signal")
        message.add_boolean(False)  # noqa: FBT003 - no reply is wanted
        message.add_string(name)
        with contextlib.suppress(paramiko.SSHException, OSError, EOFError):  # a lost connection ends it as well
            transport._send_user_message(message)


class SshHost(Host):
    """A machine over one SSH connection; many commands share it, each on a channel of its own."""

    def __init__(self, name: str, target: SshTarget, client: paramiko.SSHClient) -> None:
        super().__init__(name)
        self.target = target
        self.client = client
        self._slots = threading.Semaphore(_SESSIONS)

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
            channel.exec_command(shlex.join(argv))
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

    def bulk_argv(self, argv: Sequence[str], link_address: str) -> list[str]:
        """See `Host`: an OpenSSH process, over the link address if one is named."""
        return [*self.target.bulk_command(link_address), shlex.join(argv)]

    def close(self) -> None:
        """See `Host`."""
        self.client.close()


class UnreachableHost(Host):
    """A machine that could not be reached: whoever asks it anything gets the reason."""

    def __init__(self, name: str, error: SparkserveError) -> None:
        super().__init__(name)
        self.error = error

    def open(self, argv: Sequence[str]) -> Process:
        """See `Host`."""
        del argv
        raise self.error

    def close(self) -> None:
        """See `Host`."""


def connection_lost(node: str, details: str = "") -> SparkserveError:
    """Say that a connection which was there is gone."""
    hint = f"ping the {node}; if it answers and ssh does not, the machine is out of memory: wait, then look again"
    return SparkserveError("connection_lost", "the SSH connection ended", hint, node, details, exit_code=6)


@contextlib.contextmanager
def running(host: Host, argv: Sequence[str]) -> Iterator[Process]:
    """Open a process and make sure that it is closed."""
    log.debug("%s: %s", host.name, shlex.join(argv))
    process = host.open(argv)
    try:
        yield process
    finally:
        process.close()


def mask(text: str, secrets: Sequence[SecretStr | None]) -> str:
    """Replace every secret in a text that other programs wrote."""
    for secret in secrets:
        if secret is not None and len(secret.get_secret_value()) >= 4:
            text = text.replace(secret.get_secret_value(), "***")
    return text


def expand_home(path: Path, home: str) -> str:
    """Replace a leading `~` by the home directory of the node's account."""
    text = str(path)
    return os.path.join(home, text[2:]) if text.startswith("~/") or text == "~" else text  # noqa: PTH118 - a path of another machine
