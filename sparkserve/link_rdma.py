"""RDMA devices as /sys/class/infiniband shows them: their interface, state, rate and table of addresses (GIDs)."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_PORT = "/sys/class/infiniband/*/ports/1"
RDMA_GLOBS = {
    "netdev": "/sys/class/infiniband/*/device/net/*",
    "state": f"{_PORT}/state",
    "rate": f"{_PORT}/rate",
    "gid": f"{_PORT}/gids/*",
    "type": f"{_PORT}/gid_attrs/types/*",
    "ndev": f"{_PORT}/gid_attrs/ndevs/*",
}


@dataclass(frozen=True)
class Gid:
    """One entry of an RDMA device's address table."""

    index: int
    address: str
    kind: str
    interface: str


@dataclass(frozen=True)
class RdmaDevice:
    """One RDMA device: the interface it belongs to, whether its port is active, its addresses, its rate in Mb/s.

    `unread` is the first file that says what its port or an address of it is, and could not be read.
    """

    name: str
    interface: str
    active: bool
    gids: tuple[Gid, ...]
    rate_mbps: int | None = None
    unread: str = ""


def parse_rdma(found: Mapping[str, Mapping[str, str | None]]) -> tuple[RdmaDevice, ...]:
    """Read the RDMA devices from the files of /sys/class/infiniband."""
    netdevs = {path.split("/")[4]: path.rsplit("/", 1)[1] for path in found["netdev"]}
    return tuple(
        RdmaDevice(
            name=name,
            interface=netdevs.get(name, ""),
            active="ACTIVE" in (found["state"].get(f"/sys/class/infiniband/{name}/ports/1/state") or ""),
            gids=tuple(_gids(name, found)),
            rate_mbps=_rate(found["rate"].get(f"/sys/class/infiniband/{name}/ports/1/rate")),
            unread=next(_unread(f"/sys/class/infiniband/{name}/ports/1", found), ""),
        )
        for name in sorted({path.split("/")[4] for path in found["state"]})
    )


def _rate(text: str | None) -> int | None:
    match = re.match(r"([\d.]+) Gb/sec", text or "")
    return round(float(match[1]) * 1000) if match else None


def _unread(root: str, found: Mapping[str, Mapping[str, str | None]]) -> Iterator[str]:
    """List the files that could not be read; the kind of an empty entry never can be."""
    states, gids, kinds = found["state"], found["gid"], found["type"]
    yield from (path for path, text in {**states, **gids}.items() if path.startswith(f"{root}/") and text is None)
    for path, text in gids.items():
        kind = path.replace("/gids/", "/gid_attrs/types/")
        if path.startswith(f"{root}/") and (text or "").strip("0:\n") and kinds.get(kind) is None:
            yield kind


def _gids(device: str, found: Mapping[str, Mapping[str, str | None]]) -> list[Gid]:
    root = f"/sys/class/infiniband/{device}/ports/1"
    gids = []
    for path, text in found["gid"].items():
        folder, _, index = path.rpartition("/")
        if folder == f"{root}/gids" and (text or "").strip("0:\n"):  # an empty entry is all zeros
            kind = (found["type"].get(f"{root}/gid_attrs/types/{index}") or "").strip()
            interface = (found["ndev"].get(f"{root}/gid_attrs/ndevs/{index}") or "").strip()
            gids.append(Gid(int(index), (text or "").strip(), kind, interface))
    return sorted(gids, key=lambda gid: gid.index)


def find_gid_index(device: RdmaDevice, address: str, interface: str) -> int | None:
    """Find the RoCE v2 entry of the link's IPv4 address; it differs per node and moves, so it is never remembered."""
    wanted = ipaddress.IPv6Address(f"::ffff:{address}")
    for gid in device.gids:
        right_kind = gid.kind == "RoCE v2" and gid.interface in ("", interface)
        if right_kind and ipaddress.IPv6Address(gid.address) == wanted:
            return gid.index
    return None
