"""Host memory tuning: sysctls of the recipe on both nodes, with a journal that can put the old values back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkserve.cluster import Cluster, Deployment, Node, Role
from sparkserve.errors import SparkserveError
from sparkserve.plan import Change, Work

STEP = "tune"
SYSCTL_FILE = "/etc/sysctl.d/90-sparkserve.conf"
JOURNAL_DIR = "/var/lib/sparkserve"
JOURNAL = f"{JOURNAL_DIR}/tuning.json"


@dataclass(frozen=True)
class Facts:
    """Values now (None where the kernel has no such name), the file that keeps them over a reboot, and the journal."""

    values: Mapping[str, str | None]
    file: str | None
    journal: Mapping[str, Any]


def gather(node: Node, sysctls: Mapping[str, str]) -> Facts:
    """Read the sysctls that the recipe names, and what an earlier run left."""
    paths = {name: "/proc/sys/" + name.replace(".", "/") for name in sysctls}
    files = node.session.ask("facts", files=[*paths.values(), SYSCTL_FILE, JOURNAL])["files"]
    values = {name: _clean(files[path]) for name, path in paths.items()}
    return Facts(values, files[SYSCTL_FILE], _read_journal(node, files[JOURNAL]))


def _read_journal(node: Node, text: str | None) -> dict[str, Any]:
    try:
        journal = json.loads(text or "{}")
        if isinstance(journal, dict) and isinstance(journal.get("before", {}), dict):
            return journal
    except ValueError:
        pass  # told below, together with what is JSON and no journal
    hint = f"look at {JOURNAL}; without it the values from before the tuning are not known"
    raise SparkserveError("tuning_journal", f"{JOURNAL} is broken", hint, node.role)


def _clean(text: str | None) -> str | None:
    return None if text is None else " ".join(text.split())


def file_text(sysctls: Mapping[str, str]) -> str:
    """Give the text of the file that keeps the values over a reboot."""
    lines = [f"{name} = {value}" for name, value in sorted(sysctls.items())]
    return "\n".join(["# written by sparkserve; `sparkserve tune --undo` removes it", *lines, ""])


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan one change for each node whose values or file differ."""
    wanted = deployment.recipe.tuning.sysctl
    changes = []
    for node in deployment.cluster.nodes:
        found = facts[node.role]
        absent = [name for name in wanted if found.values[name] is None]
        if absent:
            hint = "look at [tuning.sysctl] of the recipe; `sparkserve up --skip tune` goes without"
            raise SparkserveError("sysctl_unknown", f"the kernel has no {', '.join(absent)}", hint, node.role)
        differing = {name: value for name, value in wanted.items() if found.values[name] != value}
        keeps = found.file == file_text(wanted)
        if wanted and (differing or not keeps):
            changes.append(_change(node, found, wanted))
    return changes


def _change(node: Node, found: Facts, wanted: Mapping[str, str]) -> Change:
    before = ", ".join(f"{name}={found.values[name]}" for name in sorted(wanted))
    after = ", ".join(f"{name}={value}" for name, value in sorted(wanted.items()))

    def action(work: Work) -> str:
        work.note("writing the journal, then the values")
        return set_values(node, found, wanted)

    kept = "" if found.file else ", not kept over a reboot"
    return Change(node.role, STEP, "sysctl", before + kept, after, action, lane="sudo")


def root_commands(wanted: Mapping[str, str]) -> list[list[str]]:
    """List what `set_values` and `undo` run as root."""
    return [
        ["mkdir", "-p", JOURNAL_DIR],
        ["tee", f"{JOURNAL}.new"],
        ["mv", "-f", f"{JOURNAL}.new", JOURNAL],
        *([_write_argv(wanted)] if wanted else []),
        ["tee", SYSCTL_FILE],
        ["rm", "-f", SYSCTL_FILE, JOURNAL],
    ]


def _write_argv(values: Mapping[str, str]) -> list[str]:
    return ["sysctl", "-q", "-w", *[f"{name}={value}" for name, value in sorted(values.items())]]


def set_values(node: Node, found: Facts, wanted: Mapping[str, str]) -> str:
    """Write the old values to the journal, then set the new ones, then the file; the proof is what is read back."""
    old = {name: found.values[name] for name in wanted}
    # The first values are the owner's own; what a second run finds are ours.
    journal = {"since": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **found.journal}
    journal["before"] = {**old, **found.journal.get("before", {})}
    # The journal is renamed when it is whole: half a one would lose the owner's values.
    texts = {f"{JOURNAL}.new": json.dumps(journal), SYSCTL_FILE: file_text(wanted)}
    *commands, _ = root_commands(wanted)
    for argv in commands:
        node.host.sudo(argv, stdin=texts.get(argv[-1], "").encode() if argv[0] == "tee" else b"")
    now = gather(node, wanted)
    wrong = [name for name, value in wanted.items() if now.values[name] != value]
    if wrong or now.file != file_text(wanted):
        observed = ", ".join(f"{name}={now.values[name]}" for name in wrong)
        hint = "another program sets them: `grep -rs vm /etc/sysctl.d`; `sparkserve up --skip tune` goes without"
        raise SparkserveError("tuning_failed", f"values did not stay: {observed}", hint, node.role)
    return ", ".join(f"{name}={now.values[name]}" for name in sorted(wanted))


def undo(cluster: Cluster) -> dict[str, str]:
    """Put the values back that the journal kept, and remove our file; where one node refuses root, on neither."""
    cluster.on_both(_try_root)
    return {str(role): text for role, text in cluster.on_both(_undo_one).items()}


def _try_root(node: Node) -> None:
    """Try root where there is something to put back."""
    found = gather(node, {})
    if found.journal.get("before") or found.file is not None:
        try:
            node.host.sudo(["true"])
        except SparkserveError as error:
            error.hint = error.hint.replace("sparkserve tune", "sparkserve tune --undo")
            raise


def kept_values(node: Node) -> str:
    """Tell which values `undo` would put back on a node."""
    before = gather(node, {}).journal.get("before", {})
    return ", ".join(f"{name}={value}" for name, value in sorted(before.items())) or "nothing to put back"


def _undo_one(node: Node) -> str:
    found = gather(node, {})
    before = {name: value for name, value in found.journal.get("before", {}).items() if value is not None}
    if not before and found.file is None:
        return "nothing to put back"
    if before:
        node.host.sudo(_write_argv(before))
    node.host.sudo(root_commands({})[-1])
    return ", ".join(f"{name}={value}" for name, value in sorted(before.items())) or f"{SYSCTL_FILE} removed"
