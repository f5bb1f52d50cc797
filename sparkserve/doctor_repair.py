"""What a check-up may put right after asking: a host key, directories, and a sudo rule that is written for review."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

from sparkserve import lifecycle, ssh_trust
from sparkserve.checks import Check
from sparkserve.cluster import Cluster, Role, connect
from sparkserve.doctor import Report, root_commands
from sparkserve.lifecycle import Session
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings

_MAKES_DIRECTORY = "sudo install -d "
# Where sudo looks for a command, whatever the PATH of who calls it: as Debian and Ubuntu set `secure_path`.
_SECURE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def repair(
    session: Session,
    examine: Callable[..., Report],
    agree: Callable[[str], bool],
    ask: Callable[[str, str], bool],
    opened: Cluster | None = None,
) -> Report:
    """Do what is safe and agreed to, and look again; a host key takes a person, whatever was agreed to beforehand."""
    report = examine(opened)
    if _has_unknown_key(report):
        ssh_trust.meet(session.settings, None, lambda question, flag: ask(question, f"it to init: {flag}"))
        report, opened = examine(), None
    agreed = [check for check, deed in _deeds(report) if agree(f"{check.node}: {deed}?")]
    if not agreed:
        session.voice.say("nothing was changed")
        return report
    with nullcontext(opened) if opened else connect(session.settings) as cluster:
        for check in agreed:
            session.voice.say(f"{check.node}: {_do(session, cluster, check)}")
        return examine(cluster)


def list_deeds(report: Report) -> list[tuple[str, str]]:
    """List by node what a repair would ask for."""
    first = [("worker", "trust its host key, once you have compared it")] if _has_unknown_key(report) else []
    return [*first, *((str(check.node), deed) for check, deed in _deeds(report))]


def _has_unknown_key(report: Report) -> bool:
    error = report.unseen.get("worker")
    return error is not None and error.code == "host_key_unknown"


def _deeds(report: Report) -> list[tuple[Check, str]]:
    return [(check, deed) for check in report.checks if (deed := _deed(check))]


def _deed(check: Check) -> str:
    """Say what would be done about a check; empty where that is the owner's."""
    if check.verdict in ("warn", "fail"):
        if check.id == "writable" and check.hint.startswith(_MAKES_DIRECTORY):
            return check.hint
        if check.id == "sudo" and check.observed.startswith("sudo: password"):
            return "write a rule for /etc/sudoers.d to a file on the head, for you to read"
    return ""


def _do(session: Session, cluster: Cluster, check: Check) -> str:
    node = cluster.node(check.node)
    if check.id == "writable":
        argv = shlex.split(check.hint)[1:]
        lifecycle.give_sudo_password(session, node, argv)
        node.host.sudo(argv)
        return f"done: {check.hint}"
    tools = [words[0] for words in root_commands(session.recipe)]
    paths = node.session.ask("facts", tools=tools, path=_SECURE_PATH)["tools"]
    text = sudo_rule(node.identity["user"], paths, session.recipe)
    file = session.state / f"sudoers-{node.role}"
    session.state.mkdir(parents=True, exist_ok=True, mode=0o700)
    cluster.head.host.write(file, text.encode(), 0o600)
    return f"{file} is written; read it, then: {_install_rule(session.settings, node.role, file)}"


def _install_rule(settings: Settings, role: Role, file: Path) -> str:
    """Give the command line, to be typed on the head, that puts a rule where sudo reads it."""
    install = "sudo install -m 440 {} /etc/sudoers.d/sparkserve".format
    if role == "head":
        return install(shlex.quote(str(file)))
    words = ["-P", str(settings.ssh_port)] if settings.ssh_port else []
    words += ["-i", str(settings.ssh_key.expanduser())] if settings.ssh_key else []
    copy = shlex.join(["scp", *words, str(file), f"{settings.worker}:"])
    words = ["-p" if word == "-P" else word for word in words]
    return f"{copy} && {shlex.join(['ssh', '-t', *words, settings.worker, install(file.name)])}"


def sudo_rule(user: str, paths: Mapping[str, str | None], recipe: Recipe) -> str:
    """Give a sudoers file that allows what tuning and a start run as root, and nothing else."""
    names = "|".join(re.escape(name) for name in sorted(recipe.tuning.sysctl))
    allowed = []
    for tool, *words in root_commands(recipe):
        # Undoing it writes other values under the same names.
        given = f"^-q -w( ({names})=[-0-9]+)+$" if tool == "sysctl" else " ".join(words)
        allowed.append(f"{paths.get(tool) or '/usr/bin/' + tool} {given}".strip())
    lines = ["# What `sparkserve tune` and `start` run as root; `visudo -cf FILE` checks it (^…$ needs sudo 1.9.10)."]
    return "\n".join([*lines, *(f"{user} ALL=(root) NOPASSWD: {command}" for command in allowed), ""])
