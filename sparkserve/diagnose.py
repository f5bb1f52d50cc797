"""One archive for a bug report: what both nodes are and said, what was wanted, and what happened; no secrets."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkserve import __version__, around, engine_logs, link, system
from sparkserve.cluster import ROLES, Cluster, Node, connect
from sparkserve.engine_facts import gather, kernel_lines
from sparkserve.engine_logs import LogLine, LogQuery
from sparkserve.errors import SparkserveError
from sparkserve.hosts import mask
from sparkserve.lifecycle import Session, draw
from sparkserve.parameters import read_secrets
from sparkserve.records import read_records
from sparkserve.watch import Journal

_LINES = 2000
_SAVED_RUNS = 3
# What the kernel says of memory that ran out, and the driver of its own troubles.
_KERNEL = re.compile(r"oom|out of memory|killed process|NVRM|Xid|mlx5|hung task", re.IGNORECASE)
_COMMANDS = {
    "smi": ["timeout", "5", "nvidia-smi"],
    "docker": ["docker", "version"],
}


@dataclass(frozen=True)
class Member:
    """One file of an archive; size in bytes."""

    name: str
    size: int
    what: str


@dataclass(frozen=True)
class Archive:
    """An archive that was written, or would be."""

    path: str
    members: tuple[Member, ...]
    dry_run: bool = False


def write_archive(session: Session, directory: Path, settings: object, *, dry_run: bool = False) -> Archive:
    """Gather all that can be had, say of the rest why not, and write it as one tar.gz that only the owner can read.

    A dry run gathers the same, and writes nothing.
    """
    secrets = [session.settings.hf_token, *read_secrets(session.settings).values()]
    stem = time.strftime("sparkserve-%Y%m%d-%H%M%S")
    path = directory / f"{stem}.tar.gz"
    directory.stat()  # one that is not there is told before anybody looks at two nodes
    written = Path(os.devnull) if dry_run else path
    files = [("settings.json", "settings and where they come from; a secret is ***", _json(settings)), *_files(session)]
    members = []
    written.touch(mode=0o600)
    with tarfile.open(written, "w:gz") as archive:
        for name, what, text in files:
            content = mask(text, secrets).encode()
            entry = tarfile.TarInfo(f"{stem}/{name}")
            entry.size, entry.mtime = len(content), int(time.time())
            archive.addfile(entry, io.BytesIO(content))
            members.append(Member(name, len(content), what))
    return Archive(str(path), tuple(members), dry_run)


def _files(session: Session) -> Iterator[tuple[str, str, str]]:
    """Give each file's name, what it is, and its text."""
    runs = session.state / "runs"
    yield "version.json", "of sparkserve and Python", _json({"sparkserve": __version__, "python": sys.version})
    yield "recipe.json", "the recipe", _json(session.recipe.model_dump(mode="json", by_alias=True))
    yield "plan.json", "both ranks' containers as they would be made", _plan(session)
    with connect(session.settings, lenient=True) as cluster:
        facts, errors = cluster.try_both(_facts)
        for role in ROLES:
            found = facts.get(role) or {"could not look": str(errors[role])}
            kernel = found.pop("kernel lines", "")
            yield f"{role}.json", "machine, memory, disks, Docker, link, GPU, containers", _json(found)
            yield f"{role}-kernel.txt", "the kernel's lines about memory and drivers", kernel
        yield "logs.txt", f"the last {_LINES} lines of each rank", _live_logs(cluster)
    records = [asdict(one) | {"pair": "left out"} for one in read_records(runs)]
    yield "history.json", "the starts that were recorded", _json(records)
    events = [asdict(one) for one in Journal(session.state / "events.jsonl").read()]
    yield "events.json", "what watches saw and did", _json(events)
    for run in engine_logs.saved_runs(runs)[:_SAVED_RUNS]:
        lines = engine_logs.read_saved(runs, run, LogQuery())[-_LINES:]
        yield f"run-{run}.txt", "the log that was kept of an earlier run", _text(lines)


def _plan(session: Session) -> str:
    try:
        drawn = draw(session, None, live=False)
    except SparkserveError as error:
        return _json({"cannot be drawn": str(error)})
    return _json({"basis": drawn.basis, "specs": {role: asdict(spec) for role, spec in drawn.specs.items()}})


def _facts(node: Node) -> dict[str, Any]:
    raw = node.session.ask("facts", timeout=30, commands=_COMMANDS)["commands"]
    kernel = [line for line in kernel_lines(node) if _KERNEL.search(line)][-_LINES:]
    return {
        "system": _told(lambda: system.gather(node)),
        "link": _told(lambda: link.gather(node)),
        "around": _told(lambda: around.parse(around.gather(node), link.gather(node))),
        "ours": _told(lambda: gather(node)),
        "nvidia-smi": raw["smi"],
        "docker": raw["docker"],
        "kernel lines": "\n".join(kernel) + "\n" if kernel else "none that this account can read\n",
    }


def _told(look: Callable[[], Any]) -> dict[str, Any]:
    """Give what was seen, or why it could not be: one thing that is broken must not hide what else there is."""
    try:
        return asdict(look())
    except SparkserveError as error:
        return {"could not look": str(error)}


def _live_logs(cluster: Cluster) -> str:
    try:
        return _text(engine_logs.read_logs(cluster, LogQuery(tail=_LINES)))
    except SparkserveError as error:
        return f"could not read: {error}\n"


def _text(lines: Iterable[LogLine]) -> str:
    return "".join(f"{line.stamp} rank {line.rank} {line.text}\n" for line in lines)


def _json(data: object) -> str:
    return json.dumps(data, indent=1, default=str) + "\n"
