"""What runs against what we would run, rank by rank: every difference, and the reason for it where one is known."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from sparkserve.cluster import Role
from sparkserve.container import FIXED_OPTIONS, BindMount, ContainerSpec
from sparkserve.takeover_facts import Running

_NO_LIMIT = "ours sets no limit: the pair is all that these nodes are for"
_REASONS = {
    "init": "ours runs Docker's init, which passes signals on and ends what the engine leaves behind",
    "restart_policy": "ours has none: `sparkserve service install` brings both ranks back together",
    "security_opt": "ours takes no new privileges and keeps Docker's own profiles",
    "log_config": "ours keeps three files of 50 MB",
    "remove": "ours stays after its end, so that its log can be read",
    "healthcheck": "`sparkserve status` and `sparkserve watch` look at both ranks instead",
    "stop_signal": "ours ends the engine by SIGTERM, and kills it when its time is over",
    **dict.fromkeys(("Memory", "MemorySwap", "MemoryReservation", "MemorySwappiness", "KernelMemory"), _NO_LIMIT),
    **dict.fromkeys(("NanoCpus", "CpuShares", "CpuQuota", "CpuPeriod", "CpusetCpus", "CpusetMems"), _NO_LIMIT),
}
_OF_A_SPEC = "gpus", "ipc", "shm_bytes", "ulimits", "oom_score_adj", "pids_limit", "stop_seconds", "user", "directory"
# What no recipe decides.
_FIXED = {
    **FIXED_OPTIONS,
    "restart_policy": FIXED_OPTIONS["restart_policy"]["Name"],
    **{"privileged": False, "remove": False, "healthcheck": "", "stop_signal": ""},
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
    """List every difference of a rank; a variable that the image sets to the same value is none."""
    spec = wanted.spec
    rows = [
        *_image(running, wanted),
        *_argv(running, spec),
        *_unlike("env", {**running.image_env, **running.env}, {**running.image_env, **spec.env}),
        *_unlike("mount", _by_target(running.mounts), _by_target(spec.mounts)),
        *_options(running, spec),
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


def _by_target(mounts: Iterable[BindMount]) -> dict[str, str]:
    return {mount.target: f"{mount.source}{' (read-only)' if mount.read_only else ''}" for mount in mounts}


def _options(running: Running, spec: ContainerSpec) -> Iterator[_Row]:
    """Compare Docker's options in the words in which a running container is read."""
    ours = {name: getattr(spec, name) for name in _OF_A_SPEC}
    ours |= {"devices": sorted(spec.devices), "capabilities": sorted(spec.capabilities), **_FIXED}
    ours["directory"] = ours["directory"] or running.image_directory
    for what, name, *shown, _ in _unlike("option", running.options, ours):
        yield what, name, shown[0], shown[1], _reason(name, running.options, ours)


def _unlike(what: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[_Row]:
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            yield what, name, _show(theirs.get(name)), _show(ours.get(name)), ""


def _show(value: object) -> str:
    return "-" if value in (None, "", [], {}) else str(value)


def _reason(name: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    gained = name in ("devices", "capabilities", "ulimits") and set(theirs[name]) <= set(ours[name])
    if theirs["privileged"] and (name == "privileged" or gained):
        return _UNPRIVILEGED
    if name == "stop_seconds" and ours[name] > theirs[name]:
        return f"ours gives the engine {ours[name]} s to end before it is killed"
    return _REASONS.get(name, "")
