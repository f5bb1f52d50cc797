"""First contact: the host key that the worker shows, and the one way in which it becomes known."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError, usage_error
from sparkserve.settings import Settings
from sparkserve.ssh import (
    CONNECT_SECONDS,
    SshTarget,
    explain,
    fingerprint,
    import_paramiko,
    open_socket,
    refuse_this_machine,
    resolve_target,
)

if TYPE_CHECKING:
    import paramiko

_FINGERPRINT = re.compile("SHA256:[A-Za-z0-9+/]{43}")


@dataclass(frozen=True)
class HostKey:
    """A host key that is not known yet: who shows it, and the line of known_hosts that makes it known."""

    address: str
    kind: str
    fingerprint: str
    line: str = field(repr=False)
    file: Path

    @property
    def question(self) -> str:
        """What a person is asked before this key is trusted."""
        short = self.kind.removeprefix("ssh-").partition("-")[0]
        return (
            f"{self.address} is not known yet; it shows the {self.kind} key {self.fingerprint}\n"
            f"(on its own screen: ssh-keygen -lf /etc/ssh/ssh_host_{short}_key.pub)\n"
            f"Trust this key from now on, in {self.file}?"
        )


def offered_key(settings: Settings, accept: str | None = None) -> HostKey | None:
    """Fetch the host key that the worker shows, without logging in; None where known_hosts has one for it.

    A known key is compared at every connection: another one in its place is an error there, and never a question.
    Here it is compared with `accept`, the fingerprint that is said to be right.
    """
    target = resolve_target(settings)
    refuse_this_machine(target)
    known = import_paramiko().HostKeys()
    for file in target.known_hosts:
        if file.is_file():
            known.load(str(file))
    if found := known.lookup(target.known_as):
        prints = [fingerprint(one) for one in found.values()]
        if accept and accept not in prints:
            message = f"{target.known_as} is known by {' and '.join(prints)}, not by {accept}; nothing was written"
            hint = f"if you re-installed the worker: ssh-keygen -R '{target.known_as}', and the same command again"
            raise SparkserveError("host_key_changed", message, hint, "worker", exit_code=EXIT_COULD_NOT_LOOK)
        return None
    key = _fetch(target)
    name = known.hash_host(target.known_as) if target.hash_known_hosts else target.known_as
    address = target.known_as if target.address in target.known_as else f"{target.known_as} ({target.address})"
    line = f"{name} {key.get_name()} {key.get_base64()}\n"
    return HostKey(address, key.get_name(), fingerprint(key), line, target.known_hosts[0])


def _fetch(target: SshTarget) -> paramiko.PKey:
    """Open a connection just far enough for the server to prove its key."""
    opened = open_socket(target, "worker")
    try:
        transport = import_paramiko().Transport(opened)
        transport.banner_timeout = CONNECT_SECONDS
        try:
            transport.start_client(timeout=3 * CONNECT_SECONDS)
            key: paramiko.PKey = transport.get_remote_server_key()
            return key
        finally:
            transport.close()
    except Exception as error:
        known = explain(error, target, "worker")
        if known is None:
            raise
        raise known from error
    finally:
        opened.close()


def trust(key: HostKey) -> None:
    """Add the key to the user's first known_hosts file, as one write after whatever is there."""
    hint = "look at UserKnownHostsFile in ~/.ssh/config, and at the owner and mode of that file"
    if not key.file.is_absolute() or key.file == Path(os.devnull):
        raise SparkserveError("known_hosts", f"ssh keeps its known hosts in `{key.file}`: nowhere", hint, "head")
    try:
        key.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(key.file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            _append(file, key.line.encode())
    except OSError as error:
        message = f"cannot write {key.file}: {error.strerror}"
        raise SparkserveError("known_hosts", message, hint, "head") from error


def _append(file: io.FileIO, line: bytes) -> None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    data = line if file.read(1) in (b"", b"\n") else b"\n" + line
    if file.write(data) != len(data):
        file.truncate(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def meet(settings: Settings, accept: str | None, ask: Callable[[str, str], bool]) -> HostKey | None:
    """Make an unknown worker known, by the very fingerprint in `accept` or by a person's yes; tells what was added.

    `ask` gets the question, and the flag that answers it where nobody can be asked.
    """
    if accept and not _FINGERPRINT.fullmatch(accept):
        message = f"{accept} is no fingerprint of a host key, which is SHA256: and 43 characters"
        raise usage_error(
            "usage", message, "on the worker's own screen: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
        )
    key = offered_key(settings, accept)
    if key is None:
        return None
    is_right = accept == key.fingerprint if accept else ask(key.question, f"--accept-host-key {key.fingerprint}")
    if not is_right:
        wrong = f"is not {accept}" if accept else "is not trusted"
        message = f"the {key.kind} key {key.fingerprint} of {key.address} {wrong}; nothing was written"
        hint = "compare it on the worker's own screen; a key that nobody can explain may be another machine's"
        raise SparkserveError("host_key_refused", message, hint, "worker", exit_code=EXIT_COULD_NOT_LOOK)
    trust(key)
    return key
