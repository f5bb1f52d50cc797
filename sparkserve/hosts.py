"""A machine seen as run, read, write; masking, and everything about the local machine."""

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Protocol

from pydantic import SecretStr

from sparkserve.errors import SparkserveError
from sparkserve.sudo_rules import frees

log = logging.getLogger("sparkserve.hosts")
_BY_HAND = "type it on that node to see it fail; `sparkserve doctor` looks at both nodes"

# A constant script; path and mode arrive as its arguments, the content on stdin. The rename makes it all or nothing.
# A cut connection ends stdin too: only a file of the whole size may take its name.
_WRITE_SCRIPT = """set -e; t="$1.sparkserve-new"; trap 'rm -f -- "$t"' EXIT; (umask 077; cat > "$t")
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

    def error_text(self) -> str:
        """Give what standard error said so far."""

    def close(self) -> None:
        """End it if it still runs, and free its streams."""


class Host(ABC):
    """The whole surface between us and a machine; a subclass only knows how to open a process there."""

    python = "python3"

    def __init__(self, name: str) -> None:
        self.name = name
        self.sudo_password: SecretStr | None = None

    @abstractmethod
    def open(self, argv: Sequence[str]) -> Process:
        """Start `argv` (never a shell line) on the machine."""

    def close(self) -> None:  # noqa: B027 - a host without a connection has none to give back
        """Give the connection back."""

    def bulk_argv(self, argv: Sequence[str], link_address: str, login: str = "") -> list[str]:  # noqa: ARG002 - for those that are far
        """Give the command of this machine that runs `argv` there with pipes of its own, for bulk data."""
        return list(argv)

    def take_login(self) -> str:
        """Give a login for `bulk_argv` that nobody uses now; empty where there is none to share."""
        return ""

    def give_login_back(self, login: str) -> None:  # noqa: B027 - see above
        """Let the next one have a login that has just worked."""

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
            raise SparkserveError("command_timeout", message, _BY_HAND, self.name) from error
        finally:
            process.close()
        log.debug("%s: exit %d", self.name, result.exit_code)
        if check and result.exit_code != 0:
            message = f"`{shlex.join(argv)}` failed with exit code {result.exit_code}"
            details = result.error_text or result.text[-2000:]
            raise SparkserveError("command_failed", message, _BY_HAND, self.name, details)
        return result

    def read(self, path: str | Path) -> bytes:
        """Read a file."""
        return self.run(["cat", "--", str(path)]).stdout

    def write(self, path: str | Path, content: bytes, mode: int = 0o644) -> None:
        """Write a file beside its goal and rename it, so that nobody meets half of it."""
        done = self.run(write_argv(path, mode, len(content)), stdin=content, check=False)
        if done.exit_code != 0:
            reason = done.error_text.rpartition(": ")[2] or "not all of it arrived"
            hint = f"look whether its directory is there, who may write to it, and `df {Path(path).parent}`"
            raise SparkserveError("file_unwritable", f"cannot write {path}: {reason}", hint, self.name)

    def asks_sudo_password(self, commands: Iterable[Sequence[str]]) -> bool:
        """Whether sudo wants a password here for one of these commands; root is not asked."""
        if self.is_root:
            return False
        asks = self.run(["sudo", "-n", "--", "true"], check=False).exit_code != 0
        return asks or bool(self.find_locked(commands))

    def find_locked(self, commands: Iterable[Sequence[str]]) -> str:
        """Find the first command for which no rule of sudo's lets us go without a password; nothing is run."""
        rules = self.run(["sudo", "-n", "-l"], check=False)
        for words in commands if rules.exit_code == 0 else ():
            allowed = self.run(["sudo", "-n", "-l", "--", *words], check=False)
            if allowed.exit_code != 0 or not frees(rules.text, allowed.text):
                return shlex.join(words)
        return ""

    @cached_property
    def is_root(self) -> bool:
        """Whether we are root on the machine."""
        return self.run(["id", "-u"]).text == "0"

    def check_sudo_password(self) -> None:
        """Try the password that we were given, if any, so that a wrong one shows before anything was changed."""
        if self.sudo_password is None or self.is_root:
            return
        # `-v` asks for it also where a rule lets single commands, such as `true`, go without.
        done = self.run(["sudo", "-k", "-S", "-p", "", "-v"], stdin=self._password_line, check=False)
        if done.exit_code != 0:
            raise sudo_needs_password(self.name, "sudo refuses the password that it was given", done.error_text)

    @property
    def _password_line(self) -> bytes:
        return self.sudo_password.get_secret_value().encode() + b"\n" if self.sudo_password else b""

    def sudo(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 60.0) -> CommandResult:
        """Run `argv` as root: directly, or by sudo without a password, or with the password we were given."""
        if self.is_root:
            return self.run(argv, stdin=stdin, timeout=timeout)
        # This comes first: a command that goes without a password would take the password for its own input.
        try:
            return self.run(["sudo", "-n", "--", *argv], stdin=stdin, timeout=timeout)
        except SparkserveError as error:
            if error.code != "command_failed" or not error.details.rpartition("\n")[2].startswith("sudo: "):
                raise
            if self.sudo_password is None:
                raise sudo_needs_password(self.name, details=error.details) from error
        # `-k` makes sudo read the password also when it remembers an earlier one, so that stdin is always as expected.
        argv = ["sudo", "-k", "-S", "-p", "", "--", *argv]
        return self.run(argv, stdin=self._password_line + stdin, timeout=timeout)


def write_argv(path: str | Path, mode: int, size: int) -> list[str]:
    """Give the command that makes a file of `size` bytes from its standard input, all or nothing."""
    return ["sh", "-c", _WRITE_SCRIPT, "sh", str(path), f"{mode:o}", str(size)]


def sudo_needs_password(
    node: str, message: str = "sudo asks for a password and none was given", details: str = ""
) -> SparkserveError:
    """Say that sudo asks for a password that we do not have."""
    hint = "run `sparkserve tune` on a terminal, or set SPARKSERVE_SUDO_PASSWORD_FILE to a file of mode 0600"
    return SparkserveError("sudo_password", message, hint, node, details, exit_code=3)


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


class Collector:
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
        """Give what was kept, after a moment for what is still on its way."""
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
        self._errors = Collector(self._stderr)

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


class UnreachableHost(Host):
    """A machine that could not be reached: whoever asks it anything gets the reason."""

    def __init__(self, name: str, error: SparkserveError) -> None:
        super().__init__(name)
        self.error = error

    def open(self, argv: Sequence[str]) -> Process:
        """See `Host`."""
        del argv
        raise self.error


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
