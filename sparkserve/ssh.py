"""Reaching the worker: what ssh's own configuration says, strict host keys, and errors that say what to do."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sparkserve.addresses import is_loopback
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError, usage_error
from sparkserve.settings import Settings, process_environment, read_private, state_dir
from sparkserve.ssh_host import SshHost

if TYPE_CHECKING:
    import paramiko

CONNECT_SECONDS = 4.0
# What paramiko says where the other side is gone between two keys.
_HUNG_UP = "No existing session"
_PRIVATE_KEY = re.compile("^-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY-----", re.MULTILINE)
# Fast on any CPU with AES instructions, which both GB10 and x86 have; `^` puts them before ssh's own, which stay.
_FAST_CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr"


@dataclass(frozen=True)
class SshTarget:
    """Where and as whom the worker is reached; `known_as` is its name in known_hosts."""

    destination: str
    address: str
    port: int
    user: str
    key_files: tuple[Path, ...]
    known_hosts: tuple[Path, ...]
    known_as: str
    proxy_command: str = ""
    hash_known_hosts: bool = False

    def bulk_command(self, link_address: str = "", login: str = "") -> list[str]:
        """Give the OpenSSH argv for bulk data, over the link address if one is named; the host key is the same one.

        The first command that names a `login` (the path of a socket) makes it, later ones use it, one after the other.
        """
        options = {
            "BatchMode": "yes",
            "StrictHostKeyChecking": "yes",
            "HostKeyAlias": self.known_as,
            "Port": str(self.port),
            "User": self.user,
            "Ciphers": _FAST_CIPHERS,
            "Compression": "no",
            "ConnectTimeout": "10",
            "ServerAliveInterval": "10",
            "ServerAliveCountMax": "3",
            "ControlPath": login or "none",
            "ClearAllForwardings": "yes",
            # What a person may want of every login, and data does not survive.
            "RemoteCommand": "none",
            "RequestTTY": "no",
            "PermitLocalCommand": "no",
        }
        if login:
            options |= {"ControlMaster": "auto", "ControlPersist": "5"}
        if link_address:
            options |= {"HostName": link_address, "ProxyCommand": "none", "ProxyJump": "none"}
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        keys = [word for key in self.key_files[:1] for word in ("-i", str(key))]
        return ["ssh", *words, *keys, self.destination]


def _check_key(path: Path) -> None:
    """Refuse a key that ssh would pass over, to take another one without a word."""
    purpose = "the private key of SPARKSERVE_SSH_KEY"
    if not _PRIVATE_KEY.search(read_private(path, purpose)):
        message = f"{path} ({purpose}) holds no private key"
        raise usage_error("secret_invalid", message, f"`ssh-keygen -yf {path}`; leave it out to use the agent's keys")


def resolve_target(settings: Settings) -> SshTarget:
    """Ask ssh itself (`ssh -G`) how it would reach the worker, so that all of the user's configuration counts."""
    if settings.ssh_key:
        _check_key(settings.ssh_key)
    argv = ["ssh", "-G"]
    argv += ["-p", str(settings.ssh_port)] if settings.ssh_port else []
    argv += ["-i", str(settings.ssh_key.expanduser())] if settings.ssh_key else []
    try:
        answer = subprocess.run([*argv, "--", settings.worker], capture_output=True, text=True, timeout=20, check=False)
    except OSError as error:
        hint = "sudo apt-get install openssh-client"
        raise SparkserveError("tool_missing", "cannot run `ssh`", hint, "head") from error
    except subprocess.TimeoutExpired as error:
        message = "ssh did not read its configuration within 20 s"
        raise SparkserveError("ssh_config", message, "look at `Match exec` in ~/.ssh/config", "head") from error
    if answer.returncode != 0:
        hint, details = f"`ssh -G {settings.worker}` shows the line", answer.stderr.strip()
        raise SparkserveError("ssh_config", "ssh refuses its configuration", hint, "head", details)
    found: dict[str, list[str]] = {}
    for line in answer.stdout.splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name, []).append(value)
    first = {name: values[0] for name, values in found.items()}
    port = int(first.get("port", "22"))
    address = first["hostname"]
    keys = tuple(Path(key).expanduser() for key in found.get("identityfile", []))
    files = f"{first.get('userknownhostsfile', '')} {first.get('globalknownhostsfile', '')}".split()
    return SshTarget(
        destination=settings.worker,
        address=address,
        port=port,
        user=first["user"],
        key_files=tuple(key for key in keys if key.exists()),
        known_hosts=tuple(Path(name).expanduser() for name in files),
        known_as=first.get("hostkeyalias", "") or (address if port == 22 else f"[{address}]:{port}"),
        proxy_command=_proxy_command(first, settings.worker.rpartition("@")[2]),
        hash_known_hosts=first.get("hashknownhosts") == "yes",
    )


def refuse_this_machine(target: SshTarget) -> None:
    """Refuse an address of our own as the worker, before anything is asked there."""
    if is_this_machine(target):
        message = f"{target.address} is this machine; the worker is the other one"
        raise usage_error("worker_is_head", message, "`sparkserve init user@address` with the worker's address")


def is_this_machine(target: SshTarget) -> bool:
    """Whether the address is an own one, which a socket can be bound to; loopback's other ports may be a tunnel."""
    if target.proxy_command:
        return False
    try:
        family, kind, _, _, place = socket.getaddrinfo(target.address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError:  # another machine's address, or a name that nobody knows
        return False
    return target.port == 22 or not is_loopback(str(place[0]))


def _proxy_command(first: Mapping[str, str], given: str) -> str:
    """Give the command that stands for the socket, as ssh itself would run it; empty where there is none."""
    address, port = first["hostname"], first.get("port", "22")
    *via, last = first.get("proxyjump", "none").split(",")
    if last != "none":
        words = ["-J", ",".join(via)] if via else []
        return shlex.join(["ssh", *words, "-W", f"[{address}]:{port}", f"ssh://{last.removeprefix('ssh://')}"])
    command = first.get("proxycommand", "none")
    tokens = {"%h": address, "%p": port, "%r": first["user"], "%n": given, "%%": "%"}
    return "" if command == "none" else re.sub("%[hprn%]", lambda match: tokens[match[0]], command)


def connect(settings: Settings, node: str = "worker") -> SshHost:
    """Open the one control connection of this command."""
    target = resolve_target(settings)
    refuse_this_machine(target)
    paramiko = import_paramiko()
    client = paramiko.SSHClient()
    for file in target.known_hosts:
        with contextlib.suppress(FileNotFoundError):
            client.load_system_host_keys(str(file))
    client.set_missing_host_key_policy(_refuse_unknown(node))
    try:
        client.connect(
            target.known_as,
            port=22,  # known_as already carries the port where it matters; the socket below goes to the right one
            username=target.user,
            sock=open_socket(target, node),
            key_filename=[str(key) for key in target.key_files] or None,
            timeout=CONNECT_SECONDS,
            banner_timeout=CONNECT_SECONDS,
            auth_timeout=15,
        )
    except Exception as error:
        transport = client.get_transport()
        was_met = transport is not None and transport.initial_kex_done
        keys_were_next = was_met and (str(error) == _HUNG_UP or (transport is not None and transport.is_active()))
        client.close()
        known = _explain_keys(error, target, node) if keys_were_next else None
        known = known or explain(error, target, node)
        if known is None:
            raise
        raise known from error
    transport = client.get_transport()
    if transport is not None:
        transport.set_keepalive(10)
    return SshHost(node, target, client, state_dir(process_environment()) / "ssh")


def import_paramiko() -> ModuleType:
    """Import paramiko without `invoke`, which it would load only to read `Match exec`: ssh itself does that for us."""
    without: dict[str, Any] = {"invoke": None} if "invoke" not in sys.modules else {}
    sys.modules.update(without)
    try:
        import paramiko
    finally:
        for name in without:
            del sys.modules[name]
    return paramiko


def _open_proxy(command: str) -> socket.socket:
    """Start the command that stands for the connection, as ssh itself does; it ends with its socket."""
    ours, theirs = socket.socketpair()
    with theirs:
        argv, end = ["sh", "-c", f"exec {command}"], theirs.fileno()
        process = subprocess.Popen(argv, stdin=end, stdout=end, start_new_session=True)
    threading.Thread(target=process.wait, daemon=True).start()
    return ours


def open_socket(target: SshTarget, node: str) -> socket.socket:
    """Open the connection to the worker's sshd, by way of the proxy where ssh would take one."""
    if target.proxy_command:
        return _open_proxy(target.proxy_command)
    where = f"{target.address} port {target.port}"
    hint = f"ssh -p {target.port} {target.user}@{target.address} true"
    try:
        connected = socket.create_connection((target.address, target.port), timeout=CONNECT_SECONDS)
    except TimeoutError as error:
        message = f"no answer from {where} within {CONNECT_SECONDS:g} s"
        raise SparkserveError("ssh_timeout", message, hint, node, exit_code=EXIT_COULD_NOT_LOOK) from error
    except OSError as error:
        message = f"cannot reach {where}: {error.strerror or error}"
        raise SparkserveError("ssh_unreachable", message, hint, node, exit_code=EXIT_COULD_NOT_LOOK) from error
    # Questions and answers are small: none should wait for the acknowledgement of the one before.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _refuse_unknown(node: str) -> paramiko.MissingHostKeyPolicy:
    import paramiko

    class Refuse(paramiko.MissingHostKeyPolicy):
        def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
            del client
            message = f"{hostname} is not in known_hosts; it shows the {key.get_name()} key {fingerprint(key)}"
            hint = "sparkserve doctor --fix  (asks once; compare it on the worker's own screen)"
            raise SparkserveError("host_key_unknown", message, hint, node, exit_code=EXIT_COULD_NOT_LOOK)

    return Refuse()


def fingerprint(key: paramiko.PKey) -> str:
    """Give a key's fingerprint as ssh prints it."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"SHA256:{digest}"


def _explain_keys(error: Exception, target: SshTarget, node: str) -> SparkserveError | None:
    """Explain a failure that came after the host key was proved: only our own keys can be the reason then."""
    import paramiko

    if not isinstance(error, paramiko.SSHException) or isinstance(error, paramiko.BadHostKeyException):
        return None
    login = f"{target.user}@{target.address}"
    tried = ", ".join(str(key) for key in target.key_files) or "no key file"
    message = f"{login} refuses us; tried {tried} and the agent"
    hint = f"ssh-copy-id -p {target.port} {login}  (a key with a passphrase needs ssh-agent and ssh-add)"
    if str(error) == _HUNG_UP:
        message = f"{login} hung up while keys were offered, as sshd does after six that it does not know; {tried}"
        hint = "name the right key: SPARKSERVE_SSH_KEY=~/.ssh/… in .env, or `IdentitiesOnly yes` in ~/.ssh/config"
    return SparkserveError("ssh_auth", message, hint, node, str(error), EXIT_COULD_NOT_LOOK)


def explain(error: Exception, target: SshTarget, node: str) -> SparkserveError | None:
    """Explain what kept us from connecting; None where that is no fault of the connection."""
    import paramiko

    login = f"{target.user}@{target.address}"
    if isinstance(error, SparkserveError):
        return error
    if isinstance(error, paramiko.BadHostKeyException):
        message = (
            f"the host key of {target.known_as} changed: known {fingerprint(error.expected_key)}, "
            f"shown {fingerprint(error.key)}"
        )
        hint = f"if you re-installed the worker: ssh-keygen -R '{target.known_as}' && ssh -p {target.port} {login} true"
        return SparkserveError("host_key_changed", message, hint, node, exit_code=EXIT_COULD_NOT_LOOK)
    if isinstance(error, paramiko.AuthenticationException):
        return _explain_keys(error, target, node)
    if isinstance(error, (paramiko.SSHException, OSError, EOFError)):
        message = f"{target.address} took the connection but does not speak SSH in time"
        hint = "the machine may be out of memory or overloaded: wait a minute, then look again"
        return SparkserveError("ssh_banner", message, hint, node, str(error), EXIT_COULD_NOT_LOOK)
    return None
