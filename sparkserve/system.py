"""Read-only facts of a node: machine, memory, disks, GPU, Docker, tools, ports, names; asked in few round trips."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sparkserve import system_text
from sparkserve.cluster import Node
from sparkserve.system_text import Container, DockerFacts, Listener

_FILES = (
    "/proc/meminfo", "/proc/swaps", "/proc/buddyinfo", "/proc/cmdline", "/proc/mounts", "/proc/uptime",
    "/etc/os-release",
)  # fmt: skip
_HOOK = "nvidia-container-runtime-hook"
TOOLS = {"head": ("git", "ssh", "docker"), "worker": ("docker",)}
# What is told of where it is there: nothing of ours stops for want of it.
_LOOKED_FOR = ("rsync", "sudo", "nvidia-smi", _HOOK)
_NVIDIA_SMI = ("timeout", "5", "nvidia-smi", "--format=csv,noheader")
OOM_DAEMONS = ("systemd-oomd", "earlyoom")
_COMMANDS = {
    "sudo": ["sudo", "-n", "--", "true"],
    "gpu": [*_NVIDIA_SMI, "--query-gpu=name,driver_version"],
    "apps": [*_NVIDIA_SMI, "--query-compute-apps=pid,process_name,used_memory"],
    "listeners": ["ss", "-H", "-l", "-t", "-n", "-p", "-e"],
    "groups": ["id", "-G", "-n"],
    "oom_daemons": ["systemctl", "is-active", *OOM_DAEMONS],
    "earlyoom": ["ps", "-C", "earlyoom", "-o", "args="],
    "docker_group": ["getent", "group", "docker"],
    "page_size": ["getconf", "PAGESIZE"],
}
_CONTAINERS = "/containers/json"


@dataclass(frozen=True)
class DiskFacts:
    """Room of the file system that holds, or will hold, a directory; bytes. `device` tells file systems apart.

    `free_inodes` is None where the file system has no limit of its own; `error` says why nothing could be seen.
    `blocked_by` is the file that stands where the directory, or a parent of it, should.
    """

    path: str
    device: int
    free: int
    total: int
    free_inodes: int | None
    writable: bool
    filesystem: str = ""
    exists: bool = False
    error: str = ""
    blocked_by: str = ""


@dataclass(frozen=True)
class PortFacts:
    """A TCP port of a node: free, or who holds it as far as this account can see; None where it could not be tried."""

    free: bool | None
    holder: str = ""
    ours: bool = False
    container: str = ""


@dataclass(frozen=True)
class GpuProcess:
    """A process that computes on the GPU, and the container that it runs in, if any."""

    pid: int
    name: str
    container: str = ""
    ours: bool = False


@dataclass(frozen=True)
class SystemFacts:
    """What a node is and has; memory in bytes. What could not be looked at is None.

    `sudo` is root, free (no password asked), password, password for `COMMAND`, missing, or no answer. `clock` is how
    far the node's clock is ahead of ours, in seconds, and by how much that may be wrong. `large_free` is free memory
    in large pieces.
    `docker_member` says whether the group lists the account, `in_docker_group` whether this session counts as a member.
    `earlyoom_floor` is the available memory below which earlyoom ends processes; None where it does not run.
    `gpu_error` is missing, no answer, or nvidia-smi's own words. `own_addresses` are what the own hostname resolves to.
    """

    hostname: str
    user: str
    python: str
    machine: str
    kernel: str
    kernel_options: str
    system: str
    uptime: float | None
    clock: tuple[float, float]
    memory: Mapping[str, int]
    swap_used: int | None
    large_free: int | None
    disks: Mapping[str, DiskFacts]
    gpu: tuple[str, str] | None
    gpu_error: str
    gpu_processes: tuple[GpuProcess, ...] | None
    docker: DockerFacts
    docker_member: bool | None
    in_docker_group: bool | None
    containers: tuple[Container, ...] | None
    tools: Mapping[str, str | None]
    sudo: str
    own_addresses: tuple[str, ...] | None
    oom_daemons: tuple[str, ...] | None
    earlyoom_floor: int | None = None
    ports: Mapping[int, PortFacts] = field(default_factory=dict)

    @property
    def serves(self) -> bool:
        """Whether a rank of ours runs here."""
        return any(one.ours for one in self.containers or ())

    @property
    def gives_gpus(self) -> bool:
        """Whether Docker can give a container the GPU: by NVIDIA's runtime, by its hook, or by a description (CDI)."""
        return "nvidia" in self.docker.runtimes or bool(self.docker.cdi or self.tools.get(_HOOK))


def gather(node: Node, ports: Sequence[int] = (), rooted: Sequence[Sequence[str]] = ()) -> SystemFacts:
    """Read the facts of a node: all at once, what the answers lead to, and the clock by a request of its own.

    Where sudo asks no password, the commands `rooted` are looked for in its rules.
    """
    places = {"models": node.models_dir, "cache": node.cache_dir}
    raw = node.session.ask(
        "facts",
        files=list(_FILES),
        disks=list(places.values()),
        tools=[*TOOLS[node.role], *_LOOKED_FOR],
        docker=["/info", _CONTAINERS],
        ports=list(ports),
        commands={**_COMMANDS, "own_name": ["getent", "ahostsv4", node.identity["hostname"]]},
    )
    root = system_text.parse_docker(raw["docker"]["/info"]).root
    groups = [f"/proc/{pid}/cgroup" for pid, _ in system_text.parse_compute_apps(raw["commands"]["apps"]) or ()]
    if root or groups:
        more = node.session.ask("facts", disks=[root] if root else [], files=groups)
        raw = {**raw, "disks": {**raw["disks"], **more["disks"]}, "files": {**raw["files"], **more["files"]}}
    if root:
        places["docker"] = root
    found = parse({**raw, "clock": _compare_clocks(node)}, node.identity, places)
    locked = node.host.find_locked(rooted) if found.sudo == "free" and rooted else ""
    return replace(found, sudo=f"password for `{locked}`") if locked else found


def _compare_clocks(node: Node) -> tuple[float, float]:
    """Tell how far the node's clock is ahead; half of the way there and back is what that may be wrong by."""
    sent = time.time()
    told = node.session.ask("facts")["time"]
    received = time.time()
    return told - (sent + received) / 2, (received - sent) / 2


def parse(raw: Mapping[str, Any], identity: Mapping[str, Any], places: Mapping[str, str]) -> SystemFacts:
    """Give raw facts their types."""
    files, commands = raw["files"], {**dict.fromkeys((*_COMMANDS, "own_name")), **raw["commands"]}
    containers = system_text.parse_containers(raw["docker"].get(_CONTAINERS, {}))
    page_size = system_text.output_of(commands["page_size"])
    members, groups = commands["docker_group"], commands["groups"]
    listeners = system_text.parse_listeners(commands["listeners"])
    memory = system_text.parse_meminfo(files.get("/proc/meminfo") or "")
    return SystemFacts(
        hostname=identity["hostname"],
        user=identity["user"],
        python=identity.get("python", ""),
        machine=raw["machine"],
        kernel=raw["kernel"],
        kernel_options=(files.get("/proc/cmdline") or "").strip(),
        system=system_text.pretty_name(files.get("/etc/os-release") or ""),
        uptime=float(files["/proc/uptime"].split()[0]) if files.get("/proc/uptime") else None,
        clock=raw["clock"],
        memory=memory,
        swap_used=system_text.parse_swaps(files.get("/proc/swaps")),
        large_free=system_text.parse_buddyinfo(
            files.get("/proc/buddyinfo"), int(page_size) if page_size.isdigit() else 0
        ),
        disks={
            name: parse_disk(path, raw["disks"][path], files.get("/proc/mounts") or "") for name, path in places.items()
        },
        gpu=system_text.parse_gpu(commands["gpu"]),
        gpu_error=_gpu_error(commands["gpu"], raw["tools"]),
        gpu_processes=_gpu_processes(commands["apps"], files, containers or ()),
        docker=system_text.parse_docker(raw["docker"]["/info"]),
        docker_member=members and identity["user"] in system_text.output_of(members).rpartition(":")[2].split(","),
        in_docker_group=identity["uid"] == 0 or (groups and "docker" in system_text.output_of(groups).split()),
        containers=containers,
        tools=raw["tools"],
        sudo=_sudo_mode(commands["sudo"], identity["uid"], raw["tools"]),
        own_addresses=system_text.parse_addresses(commands["own_name"]),
        oom_daemons=system_text.parse_active(commands["oom_daemons"], OOM_DAEMONS),
        earlyoom_floor=system_text.parse_earlyoom(commands["earlyoom"], memory.get("MemTotal", 0)),
        ports={int(port): _parse_port(int(port), state, listeners, containers) for port, state in raw["ports"].items()},
    )


def parse_disk(path: str, raw: Mapping[str, Any], mounts: str = "") -> DiskFacts:
    """Give one disk's facts; a place that cannot be looked at has no room."""
    if "error" in raw:
        return DiskFacts(path, 0, 0, 0, 0, writable=False, error=raw["error"])
    return DiskFacts(
        path,
        raw["device"],
        raw["free"],
        raw["total"],
        raw["inodes"],
        raw["writable"],
        system_text.filesystem_of(raw["place"], mounts),
        exists=raw["place"] == path,
        blocked_by=raw["place"] if raw.get("is_file") else "",
    )


def _gpu_error(answer: Mapping[str, Any] | None, tools: Mapping[str, str | None]) -> str:
    if not tools.get("nvidia-smi"):
        return "missing"
    if answer is None or answer["code"] == 124:  # of `timeout`
        return "no answer"
    return (
        "" if system_text.parse_gpu(answer) else (answer["out"] or answer["err"]).strip().split("\n")[0] or "no answer"
    )


def _gpu_processes(
    answer: Mapping[str, Any] | None, files: Mapping[str, str | None], containers: Sequence[Container]
) -> tuple[GpuProcess, ...] | None:
    found = system_text.parse_compute_apps(answer)
    if found is None:
        return None
    known = {one.id: one for one in containers}
    processes = []
    for pid, name in found:
        inside = known.get(system_text.container_in(files.get(f"/proc/{pid}/cgroup") or ""))
        processes.append(GpuProcess(pid, name, inside.name if inside else "", ours=bool(inside and inside.ours)))
    return tuple(processes)


def _parse_port(
    port: int, state: str, listeners: Sequence[Listener] | None, containers: Sequence[Container] | None
) -> PortFacts:
    """Name the holder of a port: a container by its control group or its published ports, else a process.

    Below 1024 an account may not try a port; then nobody holds it that is on the list of those who listen.
    """
    if state == "free":
        return PortFacts(free=True)
    held = next((one for one in listeners or () if one.port == port), None)
    inside = system_text.container_in(held.group) if held else ""
    container = next((one for one in containers or () if one.id == inside or port in one.ports), None)
    if container is not None:
        holder = f"container {container.name} ({container.image})"
        return PortFacts(free=False, holder=holder, ours=container.ours, container=container.name)
    if held is None and state != os.strerror(errno.EADDRINUSE):
        return PortFacts(free=None if listeners is None else True, holder=state)
    if held is None:
        return PortFacts(free=False, holder=f"somebody who is not to be seen ({state})")
    owner = "root" if held.uid == 0 else f"uid {held.uid}"
    return PortFacts(free=False, holder=held.process or f"a process of {owner}, which this account may not look at")


def _sudo_mode(answer: Mapping[str, Any] | None, uid: int, tools: Mapping[str, str | None]) -> str:
    if uid == 0:
        return "root"
    if answer is None:
        return "no answer" if tools.get("sudo") else "missing"
    return "free" if answer["code"] == 0 else "password"
