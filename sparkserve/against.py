"""What runs against what we would run, rank by rank: every difference, and the reason for it where one is known."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from sparkserve.cluster import Role
from sparkserve.container import ContainerSpec
from sparkserve.takeover_facts import Running, fixed_options

_NO_MEMORY_LIMIT = "ours sets no limit: a GPU's memory is not counted in it"
_REASONS = {
    "init": "ours runs Docker's init, which passes signals on and ends what the engine leaves behind",
    "restart_policy": "ours has none: `sparkserve service install` brings both ranks back together",
    "security_opt": "ours takes no new privileges and keeps Docker's own profiles",
    "log_config": "ours keeps three files of 50 MB",
    "remove": "ours stays after its end, so that its log can be read",
    "healthcheck": "`sparkserve status` and `sparkserve watch` look at both ranks instead",
    "Memory": _NO_MEMORY_LIMIT,
    "MemorySwap": _NO_MEMORY_LIMIT,
    "MemoryReservation": _NO_MEMORY_LIMIT,
}
_UNPRIVILEGED = "ours is never privileged: it gets the devices, capabilities and limits of RDMA by name"


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same; `reason` is empty where nobody knows why."""

    node: Role
    what: str
    name: str
    theirs: str
    ours: str
    reason: str = ""


@dataclass(frozen=True)
class Wanted:
    """Our container with its secrets in it, and what names its image on the node: reference, and id if it is there."""

    spec: ContainerSpec
    reference: str
    image_id: str = ""


def compare(running: Running, wanted: Wanted) -> list[Difference]:
    """List every difference of a rank."""
    rows = [
        *_image(running, wanted),
        *_argv(running, wanted.spec),
        *_env(running, wanted.spec),
        *_mounts(running, wanted.spec),
        *_options(running, wanted.spec),
    ]
    return [Difference(running.role, *row) for row in rows]


_Row = tuple[str, str, str, str, str]


def _image(running: Running, wanted: Wanted) -> Iterator[_Row]:
    theirs = {running.image_id, *(name.partition("@")[2] for name in running.digests)}
    if wanted.image_id != running.image_id and wanted.reference.rpartition("@")[2] not in theirs:
        yield "image", "", f"{running.image} ({running.image_id[7:19]})", wanted.reference or wanted.spec.image, ""


def _argv(running: Running, spec: ContainerSpec) -> Iterator[_Row]:
    theirs, ours = [*running.entrypoint, *running.argv], [*spec.entrypoint, *spec.argv]
    for kind, begin, end, our_begin, our_end in SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes():
        if kind != "equal":
            yield "argv", f"word {begin + 1}", shlex.join(theirs[begin:end]), shlex.join(ours[our_begin:our_end]), ""


def _env(running: Running, spec: ContainerSpec) -> Iterator[_Row]:
    """Compare the environment; a variable that the image sets to the same value is no difference."""
    theirs = {**running.image_env, **running.env}
    ours = {**running.image_env, **spec.env}
    for name in sorted({*running.env, *spec.env}):
        if theirs.get(name) != ours.get(name):
            yield "env", name, theirs.get(name, "-"), ours.get(name, "-"), ""


def _mounts(running: Running, spec: ContainerSpec) -> Iterator[_Row]:
    theirs, ours = (
        {mount.target: f"{mount.source}{' (read-only)' if mount.read_only else ''}" for mount in mounts}
        for mounts in (running.mounts, spec.mounts)
    )
    for target in sorted({*theirs, *ours}):
        if theirs.get(target) != ours.get(target):
            yield "mount", target, theirs.get(target, "-"), ours.get(target, "-"), ""


def _options(running: Running, spec: ContainerSpec) -> Iterator[_Row]:
    theirs, ours = running.options, options_of(spec)
    ours["directory"] = ours["directory"] or running.image_directory
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        if theirs.get(name) != ours.get(name):
            yield "option", name, _show(theirs.get(name)), _show(ours.get(name)), _reason(name, theirs, ours)


def _show(value: object) -> str:
    return "-" if value in (None, "", [], {}) else str(value)


def _reason(name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    gained = name in ("devices", "capabilities", "ulimits") and set(theirs[name]) <= set(ours[name])
    if theirs["privileged"] and (name == "privileged" or gained):
        return _UNPRIVILEGED
    if name == "stop_seconds" and ours[name] > theirs[name]:
        return f"ours gives the engine {ours[name]} s to end before it is killed"
    return _REASONS.get(name, "")


def options_of(spec: ContainerSpec) -> dict[str, Any]:
    """Give our container's options in the words in which a running one is read."""
    return {
        "gpus": spec.gpus,
        "ipc": spec.ipc,
        "shm_bytes": spec.shm_bytes,
        "devices": sorted(spec.devices),
        "capabilities": sorted(spec.capabilities),
        "ulimits": dict(spec.ulimits),
        "oom_score_adj": spec.oom_score_adj,
        "pids_limit": spec.pids_limit,
        "stop_seconds": spec.stop_seconds,
        "user": spec.user,
        "directory": spec.directory,
        **fixed_options(),
    }
