"""Read-only facts of a node: machine, memory, disks, Docker, tools, ports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkserve.cluster import Node

_FILES = ("/proc/meminfo", "/proc/swaps", "/etc/os-release")
TOOLS = {"head": ("git", "ssh", "docker"), "worker": ("docker",)}


@dataclass(frozen=True)
class DiskFacts:
    """Room of the file system that holds, or will hold, a directory; bytes. `device` tells file systems apart.

    `free_inodes` is None where the file system has no limit of its own.
    """

    path: str
    device: int
    free: int
    total: int
    free_inodes: int | None
    writable: bool


@dataclass(frozen=True)
class DockerFacts:
    """The node's Docker engine; `error` is one of missing, refused, permission, timeout, failed, or empty."""

    error: str
    version: str = ""
    root: str = ""
    storage: str = ""


@dataclass(frozen=True)
class SystemFacts:
    """What a node is and has; memory in bytes, time as the node's own clock in seconds since 1970.

    `sudo` is root, free (no password asked), password, or missing.
    """

    hostname: str
    user: str
    machine: str
    kernel: str
    system: str
    time: float
    memory: Mapping[str, int]
    swap_used: int
    disks: Mapping[str, DiskFacts]
    docker: DockerFacts
    tools: Mapping[str, str | None]
    ports: Mapping[int, str]
    sudo: str

    @property
    def available(self) -> int:
        """MemAvailable in bytes, 0 where the kernel does not say."""
        return self.memory.get("MemAvailable", 0)


def gather(node: Node, ports: Sequence[int] = ()) -> SystemFacts:
    """Read the facts of a node in two requests: the second asks for the disk that the first found Docker on."""
    places = {"models": node.models_dir, "cache": node.cache_dir}
    raw = node.session.ask(
        "facts",
        files=list(_FILES),
        disks=list(places.values()),
        tools=list(TOOLS[node.role]),
        docker=["/info"],
        ports=list(ports),
        commands={"sudo": ["sudo", "-n", "--", "true"]},
    )
    facts = parse(raw, node.identity, places)
    if facts.docker.root:
        more = node.session.ask("facts", disks=[facts.docker.root])["disks"]
        return parse({**raw, "disks": {**raw["disks"], **more}}, node.identity, {**places, "docker": facts.docker.root})
    return facts


def parse(raw: Mapping[str, Any], identity: Mapping[str, Any], places: Mapping[str, str]) -> SystemFacts:
    """Give raw facts their types; what could not be read stays empty."""
    files = raw["files"]
    return SystemFacts(
        hostname=identity["hostname"],
        user=identity["user"],
        machine=raw["machine"],
        kernel=raw["kernel"],
        system=_pretty_name(files["/etc/os-release"] or ""),
        time=raw["time"],
        memory=parse_meminfo(files["/proc/meminfo"] or ""),
        swap_used=parse_swaps(files["/proc/swaps"] or ""),
        disks={name: parse_disk(path, raw["disks"][path]) for name, path in places.items()},
        docker=parse_docker(raw["docker"]["/info"]),
        tools=raw["tools"],
        ports={int(port): state for port, state in raw["ports"].items()},
        sudo=_sudo_mode(raw["commands"]["sudo"], identity["uid"]),
    )


def parse_meminfo(text: str) -> dict[str, int]:
    """Read /proc/meminfo: name to bytes."""
    return {match[1]: int(match[2]) * 1024 for match in re.finditer(r"^(\S+):\s+(\d+) kB$", text, re.MULTILINE)}


def parse_swaps(text: str) -> int:
    """Give the swap in use, in bytes, from /proc/swaps."""
    rows = [line.split() for line in text.splitlines()[1:]]
    return sum(int(row[3]) * 1024 for row in rows if len(row) >= 4 and row[3].isdigit())


def parse_disk(path: str, raw: Mapping[str, Any]) -> DiskFacts:
    """Give one disk's facts; a place that cannot be looked at has no room."""
    if "error" in raw:
        return DiskFacts(path, 0, 0, 0, 0, writable=False)
    return DiskFacts(path, raw["device"], raw["free"], raw["total"], raw["inodes"], raw["writable"])


def parse_docker(raw: Mapping[str, Any]) -> DockerFacts:
    """Read the engine's answer to `/info`."""
    if "error" in raw:
        return DockerFacts(raw["error"])
    body = raw["body"] or {}
    if raw["status"] != 200:
        return DockerFacts("failed")
    return DockerFacts("", body.get("ServerVersion", ""), body.get("DockerRootDir", ""), body.get("Driver", ""))


def _sudo_mode(answer: Mapping[str, Any] | None, uid: int) -> str:
    if uid == 0:
        return "root"
    if answer is None:
        return "missing"
    return "free" if answer["code"] == 0 else "password"


def _pretty_name(text: str) -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', text, re.MULTILINE)
    return match[1] if match else ""
