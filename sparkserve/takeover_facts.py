"""Which containers run on a node, whoever made them, and everything that decides what each one is (read-only)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from sparkserve.cluster import Node, Role
from sparkserve.container import BindMount, is_ours
from sparkserve.engine_facts import Process, inspect, list_containers, parse_memory
from sparkserve.takeover_families import runs_engine

# Options of Docker that say nothing of their own: told elsewhere, or never more than a form.
_TOLD_ELSEWHERE = frozenset((
    "Binds", "Mounts", "NetworkMode", "ContainerIDFile", "PortBindings", "PublishAllPorts", "VolumeDriver", "IpcMode",
    "ShmSize", "Devices", "DeviceRequests", "CapAdd", "Ulimits", "OomScoreAdj", "PidsLimit", "CgroupnsMode", "Runtime",
    "ConsoleSize", "Isolation", "MaskedPaths", "ReadonlyPaths", "Annotations", "Init", "RestartPolicy", "LogConfig",
    "SecurityOpt", "Privileged", "AutoRemove",
))  # fmt: skip
_SHELLS = ("sh", "bash", "dash")
# What a shell or Docker sets by itself: every container has its own.
_OF_A_SHELL = frozenset(("HOME", "HOSTNAME", "OLDPWD", "PWD", "SHLVL", "TERM", "_"))
# What says no more than Docker does by itself.
_NOTHING: tuple[object, ...] = (None, 0, -1, "", [], {})
# Says that nobody thought of it.
DEFAULT_STOP_SECONDS = 10


@dataclass(frozen=True)
class Running:
    """One running container; `env` is its own environment, without what its image brings."""

    role: Role
    name: str
    is_ours: bool
    image: str
    image_id: str
    digests: tuple[str, ...]
    layers: tuple[str, ...]
    entrypoint: tuple[str, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    image_env: Mapping[str, str]
    mounts: tuple[BindMount, ...]
    options: Mapping[str, Any]
    labels: Mapping[str, str] = field(default_factory=dict)
    image_bytes: int = 0
    image_directory: str = "/"
    processes: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """All that its main process was given; the words of its script where that is a shell."""
        if not self.is_script:
            return (*self.entrypoint, *self.argv)
        try:
            return tuple(shlex.split(self.argv[0], comments=True))
        except ValueError:  # a quote that only a shell can close
            return tuple(self.argv[0].split())

    @property
    def is_script(self) -> bool:
        """Whether `bash -c` and its script are all that the container runs."""
        return _is_script((*self.entrypoint, *self.argv))

    @property
    def devices_of_a_rank(self) -> list[str]:
        """Name what it was given that a rank needs, too."""
        if self.options.get("privileged"):
            return ["every device (privileged)"]
        has_rdma = any(path.startswith("/dev/infiniband") for path in self.options.get("devices", ()))
        return ["the GPU"] * bool(self.options.get("gpus")) + ["RDMA devices"] * has_rdma

    @property
    def stop_hint(self) -> str:
        """What its owner would type to end it."""
        project = self.labels.get("com.docker.compose.project")
        return f"docker compose -p {shlex.quote(project)} stop" if project else f"docker stop {self.name}"


@dataclass(frozen=True)
class Facts:
    """What runs on a node, and the memory that is in use meanwhile, in bytes."""

    running: tuple[Running, ...]
    used_bytes: int
    available_bytes: int


def gather(node: Node) -> Facts:
    """Look at every running container of a node, at its image, and at its processes."""
    raw, rows = list_containers(node)
    memory = parse_memory(raw["files"]["/proc/meminfo"] or "")
    found = []
    for body, processes, image in inspect(node, rows, images=True):
        running = parse(node.role, body, image, tuple(one.command for one in processes))
        beside = None if running.is_ours or runs_engine(running.words) else find_beside(processes)
        found.append(_read_beside(node, running, beside) if beside else running)
    return Facts(tuple(found), memory.total - memory.available, memory.available)


def find_beside(processes: Sequence[Process]) -> Process | None:
    """Find an engine that was started in a container beside its sleeping main process, as some launchers do."""
    wrappers = (*_SHELLS, "docker-init", "tini")
    for one in processes:
        words = one.command.split()
        if words and PurePosixPath(words[0]).name not in wrappers and runs_engine(words):
            return one
    return None


def _read_beside(node: Node, running: Running, process: Process) -> Running:
    """Read what a process was given from itself, since Docker does not say it; unread it stays unknown."""
    place = f"/proc/{process.pid}/status"
    status = node.session.ask("facts", files=[place])["files"][place] or ""
    inner = re.search(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)
    own = f"/proc/{inner[1] if inner else '-'}"
    commands = (["cat", f"{own}/cmdline"], ["cat", f"{own}/environ"], ["readlink", f"{own}/cwd"])
    answers = [node.host.run(["docker", "exec", running.name, *command], check=False) for command in commands]
    if any(answer.exit_code != 0 for answer in answers):
        return running
    return given_beside(running, *(answer.text for answer in answers))


def given_beside(running: Running, cmdline: str, environ: str, directory: str) -> Running:
    """Give the container as if it had been started with what a process in it was given."""
    words = tuple(cmdline.rstrip("\0").split("\0"))
    env = {name: value for name, value in _env(environ.rstrip("\0").split("\0")).items() if name not in _OF_A_SHELL}
    own = {name: value for name, value in env.items() if running.image_env.get(name) != value}
    options = {**running.options, "directory": directory.strip()}
    return replace(running, entrypoint=words[:1], argv=words[1:], env=own, options=options)


def parse(
    role: Role, container: Mapping[str, Any], image: Mapping[str, Any], processes: tuple[str, ...] = ()
) -> Running:
    """Read Docker's descriptions of a container and of its image."""
    config, labels = container["Config"], container["Config"].get("Labels") or {}
    image_env = _env(image["Config"].get("Env"))
    own = config.get("Entrypoint") or ()
    whole = (*own, *(config.get("Cmd") or ()))
    first = 2 if _is_script(whole) else len(own) or 1
    return Running(
        role=role,
        name=container["Name"].removeprefix("/"),
        is_ours=is_ours(labels),
        image=config["Image"],
        image_id=image["Id"],
        digests=tuple(image.get("RepoDigests") or ()),
        layers=tuple(image["RootFS"].get("Layers") or ()),
        entrypoint=whole[:first],
        argv=whole[first:],
        env={name: value for name, value in _env(config.get("Env")).items() if image_env.get(name) != value},
        image_env=image_env,
        mounts=tuple(_mounts(container)),
        options=_options(container, image),
        labels=labels,
        image_bytes=image.get("Size", 0),
        image_directory=image["Config"].get("WorkingDir") or "/",
        processes=processes,
    )


def _is_script(whole: Sequence[str]) -> bool:
    is_shell = bool(whole) and PurePosixPath(whole[0]).name in _SHELLS
    return is_shell and len(whole) == 3 and re.fullmatch(r"-[a-z]*c", whole[1]) is not None


def _env(lines: list[str] | None) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in lines or ())


def _mounts(container: Mapping[str, Any]) -> list[BindMount]:
    """List the mounts by their place on the node; volumes without a name are Docker's own affair, new each time."""
    found = [
        BindMount(mount["Source"], mount["Destination"], read_only=not mount["RW"])
        for mount in container.get("Mounts") or ()
        if mount.get("Source") and not re.fullmatch(r"[0-9a-f]{64}", mount.get("Name") or "")
    ]
    return sorted(found, key=lambda mount: mount.target)


def _options(container: Mapping[str, Any], image: Mapping[str, Any]) -> dict[str, Any]:
    """Give Docker's options in the words of a recipe's container, then all others that are not Docker's defaults."""
    host, config = container["HostConfig"], container["Config"]
    is_host_ipc = host.get("IpcMode") == "host"
    # Some launchers, such as Compose, keep limits in a map: their order is another each time.
    visible = _env(config.get("Env")).get("NVIDIA_VISIBLE_DEVICES", "")
    devices, limits = host.get("Devices") or (), sorted(host.get("Ulimits") or (), key=lambda one: one["Name"])
    known = {
        # NVIDIA's runtime, which may be Docker's default, gives the GPU only to whom this variable names it.
        "gpus": bool(host.get("DeviceRequests"))
        or (host.get("Runtime") == "nvidia" and visible not in ("", "void", "none")),
        "ipc": "host" if is_host_ipc else (host.get("IpcMode") or "private").replace("shareable", "private"),
        "shm_bytes": 0 if is_host_ipc else host.get("ShmSize") or 67_108_864,
        "devices": sorted(device["PathOnHost"] for device in devices),
        "capabilities": sorted(name.removeprefix("CAP_") for name in host.get("CapAdd") or ()),
        "ulimits": {limit["Name"]: limit["Hard"] for limit in limits},
        "oom_score_adj": host.get("OomScoreAdj") or 0,
        "pids_limit": None if host.get("PidsLimit") in _NOTHING else host["PidsLimit"],
        "stop_seconds": config.get("StopTimeout") or DEFAULT_STOP_SECONDS,
        "user": _unless_default(config, image, "User"),
        "directory": config.get("WorkingDir") or "/",
        "privileged": bool(host.get("Privileged")),
        "remove": bool(host.get("AutoRemove")),
        "healthcheck": _unless_default(config, image, "Healthcheck"),
        "stop_signal": _unless_default(config, image, "StopSignal"),
        "network_mode": host.get("NetworkMode"),
        "init": bool(host.get("Init")),
        "restart_policy": (host.get("RestartPolicy") or {}).get("Name") or "no",
        # Docker adds the label by itself where the IPC is the host's.
        "security_opt": sorted(set(host.get("SecurityOpt") or ()) - {"label=disable"}),
        "log_config": host.get("LogConfig"),
    }
    in_memory = {mount["Destination"]: "" for mount in container.get("Mounts") or () if mount.get("Type") == "tmpfs"}
    unsaid = {
        **host,
        "Tmpfs": in_memory | (host.get("Tmpfs") or {}),
        "renamed devices": [one["PathInContainer"] for one in devices if one["PathInContainer"] != one["PathOnHost"]],
        "soft ulimits": {limit["Name"]: limit["Soft"] for limit in limits if limit["Soft"] != limit["Hard"]},
    }
    others = {name: value for name, value in unsaid.items() if name not in _TOLD_ELSEWHERE and value not in _NOTHING}
    return {**known, **others}


def _unless_default(config: Mapping[str, Any], image: Mapping[str, Any], name: str) -> Any:  # noqa: ANN401 - JSON
    value = config.get(name) or ""
    return "" if value == (image["Config"].get(name) or "") else value
