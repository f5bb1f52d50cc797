"""One systemd unit on the head that watches over the pair after a reboot."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from sparkserve.cluster import Node
from sparkserve.engine_facts import gather
from sparkserve.errors import EXIT_NOT_READY, SparkserveError, usage_error
from sparkserve.hosts import LocalHost, write_argv
from sparkserve.lifecycle import Session, give_sudo_password

NAME = "sparkserve.service"
_PATH = f"/etc/systemd/system/{NAME}"
# The watch itself waits for the link, the worker and both Docker engines. Ctrl-C's signal lets a restart end cleanly.
_UNIT = """\
[Unit]
Description=sparkserve: watches over the pair with {worker}
Wants=network-online.target
After=network-online.target docker.service

[Service]
Type=exec
User={user}
WorkingDirectory={directory}
{state}ExecStart={program} watch --env-file {env_file}
Restart=on-failure
RestartSec=10
TimeoutStopSec=180

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Unit:
    """The unit as it should be, and what is there: absent, as wanted, or different."""

    path: str
    text: str
    state: str


def look(session: Session) -> Unit:
    """Write the unit for these settings and compare it with the one that is there."""
    head = _head(session)
    env_file = session.loaded.env_file.absolute()
    if not env_file.exists():
        raise usage_error("settings_missing", f"there is no {env_file}", "the unit needs the settings in a file")
    state = session.environment.get("XDG_STATE_HOME")
    text = _UNIT.format(
        worker=session.settings.worker,
        user=head.identity["user"],
        directory=str(Path.cwd()).replace("%", "%%"),  # systemd takes this one as it is, spaces too
        state=f"Environment={_quoted(f'XDG_STATE_HOME={state}')}\n" if state else "",
        program=_quoted(str(Path(sys.argv[0]).absolute())),
        env_file=_quoted(str(env_file)),
    )
    there = Path(_PATH).read_text(encoding="utf-8") if Path(_PATH).exists() else None
    head.close()
    return Unit(_PATH, text, "absent" if there is None else "as wanted" if there == text else "different")


def _quoted(word: str) -> str:
    """Quote a path for systemd, to which % and $ mean something."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(character.isspace() for character in word) else escaped


def _head(session: Session) -> Node:
    return Node("head", LocalHost("head"), session.settings)


def install(session: Session, unit: Unit) -> str:
    """Write, enable and start the unit.

    A reload of systemd takes the GPU away from running containers: a new unit needs none, a changed one waits for a
    head on which nothing runs.
    """
    head = _rooted(session)
    content = unit.text.encode()
    if unit.state == "different":
        _refuse_while_serving(head)
        _systemctl(head, "stop", NAME)
    if unit.state != "as wanted":
        head.host.sudo(write_argv(unit.path, 0o644, len(content)), stdin=content)
    if unit.state == "different":
        _systemctl(head, "daemon-reload")
    _systemctl(head, "--no-reload", "enable", NAME)
    _systemctl(head, "start", NAME)
    head.close()
    return f"{NAME} is enabled and runs: `journalctl -u {NAME}` shows what it sees"


def _refuse_while_serving(head: Node) -> None:
    if any(container.is_running for container in gather(head).containers):
        message = "systemd must reload its units for a changed one, and that takes the GPU away from running containers"
        hint = "sparkserve stop, then sparkserve service install, then sparkserve start"
        raise SparkserveError("service_changes", message, hint, "head", exit_code=EXIT_NOT_READY)


def remove(session: Session, *, dry_run: bool = False) -> str:
    """Stop, disable and remove the unit; the pair is left as it is."""
    if not Path(_PATH).exists():
        return f"{NAME} was not there"
    if dry_run:
        return f"{_PATH} would be stopped, disabled and removed; nothing was touched"
    head = _rooted(session)
    _systemctl(head, "stop", NAME)
    _systemctl(head, "--no-reload", "disable", NAME)
    head.host.sudo(["rm", "-f", "--", _PATH])
    head.close()
    return f"{NAME} is removed; the pair goes on, without anyone who restarts it"


def _rooted(session: Session) -> Node:
    head = _head(session)
    give_sudo_password(session, head, ["systemctl", "daemon-reload"])
    return head


def _systemctl(head: Node, *words: str) -> None:
    try:
        head.host.sudo(["systemctl", *words], timeout=120)
    except SparkserveError as error:
        if error.code != "command_failed":
            raise
        message, hint = f"`systemctl {' '.join(words)}` failed", f"journalctl -u {NAME}"
        raise SparkserveError("service_failed", message, hint, "head", error.details) from error
