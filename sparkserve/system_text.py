"""What tools, `/proc` and the Docker engine say of a node, taken apart (pure); None stands for "could not look"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkserve.container import is_ours

Answer = Mapping[str, Any] | None
_EARLYOOM_PERCENT = 10
_LARGE_BYTES = 16 << 20
_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class DockerFacts:
    """The node's Docker engine; `error` is one of missing, refused, permission, timeout, failed, or empty.

    `cdi` are the NVIDIA devices that it found described on the node, which it gives without a runtime of NVIDIA's.
    """

    error: str
    version: str = ""
    root: str = ""
    storage: str = ""
    runtimes: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True)
class Container:
    """A container that runs; `ports` are those of the node that lead to it."""

    id: str
    name: str
    image: str
    ours: bool
    on_host_network: bool
    ports: tuple[int, ...]


@dataclass(frozen=True)
class Listener:
    """Who listens on a TCP port, as far as this account can see: a process by name and number, a control group."""

    port: int
    process: str
    uid: int
    group: str


def parse_meminfo(text: str) -> dict[str, int]:
    """Read /proc/meminfo: name to bytes."""
    return {match[1]: int(match[2]) * 1024 for match in re.finditer(r"^(\S+):\s+(\d+) kB$", text, re.MULTILINE)}


def parse_swaps(text: str | None) -> int | None:
    """Give the swap in use, in bytes, from /proc/swaps."""
    if text is None:
        return None
    rows = [line.split() for line in text.splitlines()[1:]]
    return sum(int(row[3]) * 1024 for row in rows if len(row) >= 4 and row[3].isdigit())


def parse_buddyinfo(text: str | None, page_size: int) -> int | None:
    """Give the bytes that are free in large pieces, from /proc/buddyinfo.

    Large is 16 MiB, or the largest piece that this kernel keeps where that is smaller.
    """
    rows = [line.split()[4:] for line in (text or "").splitlines() if line.startswith("Node ")]
    if not rows or not page_size or not all(word.isdigit() for row in rows for word in row):
        return None
    sizes = [page_size << order for order in range(max(len(row) for row in rows))]
    least = min(_LARGE_BYTES, sizes[-1])
    return sum(int(count) * size for row in rows for count, size in zip(row, sizes, strict=False) if size >= least)


def parse_mounts(text: str) -> list[tuple[str, str]]:
    """List place and kind of every mount, from /proc/mounts, which has odd characters as octal numbers."""
    rows = [line.split() for line in text.splitlines()]
    return [(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), row[1]), row[2]) for row in rows if len(row) > 2]


def filesystem_of(path: str, mounts: str) -> str:
    """Find the kind of file system that a path lies on; the last of the longest place holds."""
    found = [row for row in parse_mounts(mounts) if f"{path}/".startswith(f"{row[0].rstrip('/')}/")]
    return max(reversed(found), key=lambda row: len(row[0]), default=("", ""))[1]


def parse_gpu(answer: Answer) -> tuple[str, str] | None:
    """Read name and driver of the first GPU from nvidia-smi."""
    words = [word.strip() for word in output_of(answer).split("\n")[0].split(",")]
    return (words[0], words[1]) if len(words) == 2 and re.match(r"\d", words[1]) else None


def parse_compute_apps(answer: Answer) -> tuple[tuple[int, str], ...] | None:
    """Read number and name of the processes on the GPU; the memory column is `[N/A]` on some and wanted by none."""
    if answer is None or answer["code"] != 0:
        return None
    rows = [[word.strip() for word in line.split(",")] for line in answer["out"].splitlines() if line.strip()]
    processes = tuple((int(row[0]), row[1]) for row in rows if len(row) >= 2 and row[0].isdigit())
    return None if rows and not processes else processes


def parse_listeners(answer: Answer) -> tuple[Listener, ...] | None:
    """Read `ss -Hltnpe`; processes of others have no name there, and root's no uid."""
    if answer is None or answer["code"] != 0:
        return None
    found = []
    for line in answer["out"].splitlines():
        words = line.split()
        port = words[3].rpartition(":")[2] if len(words) > 3 else ""
        if port.isdigit():
            user = re.search(r'users:\(\("([^"]+)",pid=(\d+)', line)
            uid, group = re.search(r"\buid:(\d+)", line), re.search(r"\bcgroup:(\S+)", line)
            process = f"{user[1]} (process {user[2]})" if user else ""
            found.append(Listener(int(port), process, int(uid[1]) if uid else 0, group[1] if group else ""))
    return tuple(found)


def parse_addresses(answer: Answer) -> tuple[str, ...] | None:
    """Read `getent ahostsv4`: one address a line, each several times; a name that leads nowhere gives none."""
    if answer is None:
        return None
    return tuple(dict.fromkeys(line.split()[0] for line in output_of(answer).splitlines() if line.strip()))


def parse_active(answer: Answer, units: Sequence[str]) -> tuple[str, ...] | None:
    """Read `systemctl is-active`: the units that are, whatever its exit code says of the others."""
    words = answer["out"].split() if answer else []
    return tuple(unit for unit, word in zip(units, words, strict=False) if word == "active") if words else None


def parse_earlyoom(answer: Answer, total: int) -> int | None:
    """Give the available memory, in bytes, below which earlyoom acts by its command line; None where it does not run.

    `-m` is in percent, `-M` in KiB; the lower one counts.
    """
    line = output_of(answer)
    percent, kib = (re.search(rf"\s-{option}\s*(\d+)", line) for option in "mM")
    floors = [int(kib[1]) * 1024] if kib else []
    if percent or not kib:
        floors.append(total * int(percent[1] if percent else _EARLYOOM_PERCENT) // 100)
    return min(floors) if line else None


def container_in(group: str) -> str:
    """Find the container's id in the path of a control group; empty where it is none of a container."""
    match = _CONTAINER_ID.search(group)
    return match[0] if match else ""


def parse_docker(raw: Mapping[str, Any]) -> DockerFacts:
    """Read the engine's answer to `/info`."""
    if "error" in raw:
        return DockerFacts(raw["error"])
    body = raw["body"] or {}
    if raw["status"] != 200:
        return DockerFacts("failed")
    runtimes = tuple(sorted(body.get("Runtimes") or ()))
    found = (str(one.get("ID")) for one in body.get("DiscoveredDevices") or ())
    cdi = tuple(name for name in found if name.startswith("nvidia.com/"))
    version, root = body.get("ServerVersion", ""), body.get("DockerRootDir", "")
    return DockerFacts("", version, root, body.get("Driver", ""), runtimes, cdi)


def parse_containers(raw: Mapping[str, Any]) -> tuple[Container, ...] | None:
    """Read the engine's answer to `/containers/json`."""
    if raw.get("status") != 200:
        return None
    return tuple(
        Container(
            id=row["Id"],
            name=(row.get("Names") or ["?"])[0].removeprefix("/"),
            image=row.get("Image", ""),
            ours=is_ours(row.get("Labels")),
            on_host_network=(row.get("HostConfig") or {}).get("NetworkMode") == "host",
            ports=published_ports(row),
        )
        for row in raw["body"] or ()
    )


def published_ports(row: Mapping[str, Any]) -> tuple[int, ...]:
    """List the ports of a container that Docker opens on the node; the engine keeps them in a map, in no order."""
    return tuple(sorted({port["PublicPort"] for port in row.get("Ports") or () if "PublicPort" in port}))


def output_of(answer: Answer) -> str:
    """Give what a tool printed; empty where it failed or is not there."""
    return str(answer["out"]).strip() if answer is not None and answer["code"] == 0 else ""


def pretty_name(text: str) -> str:
    """Read the system's name from /etc/os-release."""
    match = re.search(r'^PRETTY_NAME="?([^"\n]*)', text, re.MULTILINE)
    return match[1] if match else ""
