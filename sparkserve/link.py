"""Read-only facts of the cable: which interface of each node owns the link address, its RDMA devices and GID index."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkserve.cluster import Node
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError

_PORT_SUFFIX = re.compile(r"(f\d+np\d+|f\d+)$")
_GLOBS = {
    "speed": "/sys/class/net/*/speed",
    "netdev": "/sys/class/infiniband/*/device/net/*",
    "state": "/sys/class/infiniband/*/ports/1/state",
    "gid": "/sys/class/infiniband/*/ports/1/gids/*",
    "type": "/sys/class/infiniband/*/ports/1/gid_attrs/types/*",
    "ndev": "/sys/class/infiniband/*/ports/1/gid_attrs/ndevs/*",
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
    """One RDMA device: the interface it belongs to, whether its port is active, its addresses."""

    name: str
    interface: str
    active: bool
    gids: tuple[Gid, ...]


@dataclass(frozen=True)
class Interface:
    """One network interface; speed in Mb/s, None where the driver does not say."""

    name: str
    addresses: tuple[str, ...]
    mtu: int
    up: bool
    speed_mbps: int | None


@dataclass(frozen=True)
class LinkFacts:
    """What one node knows of the cable; `interface` is empty where nothing owns the link address."""

    address: str
    interface: str
    twin: str
    hcas: tuple[str, ...]
    gid_index: int | None
    mtu: int
    speed_mbps: int | None
    interfaces: tuple[Interface, ...]


def gather(node: Node) -> LinkFacts:
    """Read interfaces and RDMA devices of a node in one request."""
    raw = node.session.ask("facts", commands={"ip": ["ip", "-json", "address"]}, globs=list(_GLOBS.values()))
    return parse(raw, node.link_address)


def parse(raw: Mapping[str, Any], address: str) -> LinkFacts:
    """Work out the link of a node from its raw facts."""
    found = {name: raw["globs"][pattern] for name, pattern in _GLOBS.items()}
    interfaces = parse_interfaces(raw["commands"]["ip"], found["speed"])
    owner = next((item for item in interfaces if address and address in item.addresses), None)
    if owner is None:
        return LinkFacts(address, "", "", (), None, 0, None, interfaces)
    twin = _find_twin(owner.name, interfaces)
    devices = parse_rdma(found)
    own = next((device for device in devices if device.interface == owner.name and device.active), None)
    index = find_gid_index(own, address, owner.name) if own else None
    halves = sorted(
        (item for item in devices if item.active and item.interface in (owner.name, twin)), key=_is_not(own)
    )
    hcas = tuple(device.name for device in halves if device is own or _answers_at(device, index))
    return LinkFacts(address, owner.name, twin, hcas, index, owner.mtu, owner.speed_mbps, interfaces)


def parse_interfaces(answer: Mapping[str, Any] | None, speeds: Mapping[str, str | None]) -> tuple[Interface, ...]:
    """Read what `ip -json address` answered; no answer is not the same as no interfaces."""
    try:
        rows = json.loads(answer["out"]) if answer and answer["code"] == 0 else None
    except ValueError:
        rows = None
    if rows is None:
        message = "cannot see the network interfaces: `ip -json address` gave no answer"
        hint = "sudo apt-get install iproute2"
        details = answer["err"] if answer else ""
        raise SparkserveError("link_unseen", message, hint, details=details, exit_code=EXIT_COULD_NOT_LOOK)
    return tuple(
        Interface(
            name=row["ifname"],
            addresses=tuple(item["local"] for item in row.get("addr_info", ()) if item.get("family") == "inet"),
            mtu=row.get("mtu", 0),
            up="LOWER_UP" in row.get("flags", ()),
            speed_mbps=_speed(speeds.get(f"/sys/class/net/{row['ifname']}/speed")),
        )
        for row in rows
        if row.get("ifname") and row["ifname"] != "lo"
    )


def _speed(text: str | None) -> int | None:
    value = (text or "").strip()
    return int(value) if value.isdigit() else None


def _find_twin(name: str, interfaces: tuple[Interface, ...]) -> str:
    """Find the other PCIe half of the same port: the same function and port number, another PCI domain."""
    suffix = _PORT_SUFFIX.search(name)
    if suffix is None:
        return ""
    others = [item.name for item in interfaces if item.name != name and item.name.endswith(suffix[1]) and item.up]
    return others[0] if len(others) == 1 else ""


def parse_rdma(found: Mapping[str, Mapping[str, str | None]]) -> tuple[RdmaDevice, ...]:
    """Read the RDMA devices from the files of /sys/class/infiniband."""
    netdevs = {path.split("/")[4]: path.rsplit("/", 1)[1] for path in found["netdev"]}
    return tuple(
        RdmaDevice(
            name=name,
            interface=netdevs.get(name, ""),
            active="ACTIVE" in (found["state"].get(f"/sys/class/infiniband/{name}/ports/1/state") or ""),
            gids=tuple(_gids(name, found)),
        )
        for name in sorted({path.split("/")[4] for path in found["state"]})
    )


def _gids(device: str, found: Mapping[str, Mapping[str, str | None]]) -> list[Gid]:
    root = f"/sys/class/infiniband/{device}/ports/1"
    gids = []
    for path, text in found["gid"].items():
        folder, _, index = path.rpartition("/")
        if folder == f"{root}/gids" and text and text.strip():
            kind = (found["type"].get(f"{root}/gid_attrs/types/{index}") or "").strip()
            interface = (found["ndev"].get(f"{root}/gid_attrs/ndevs/{index}") or "").strip()
            gids.append(Gid(int(index), text.strip(), kind, interface))
    return sorted(gids, key=lambda gid: gid.index)


def find_gid_index(device: RdmaDevice, address: str, interface: str) -> int | None:
    """Find the RoCE v2 entry of the link's IPv4 address; it differs per node and moves, so it is never remembered."""
    wanted = ipaddress.IPv6Address(f"::ffff:{address}")
    for gid in device.gids:
        right_kind = gid.kind == "RoCE v2" and gid.interface in ("", interface)
        if right_kind and ipaddress.IPv6Address(gid.address) == wanted:
            return gid.index
    return None


def _is_not(own: RdmaDevice | None) -> Callable[[RdmaDevice], bool]:
    """Give a sort key that puts the device of the link address first."""
    return lambda device: device is not own


def _answers_at(device: RdmaDevice, index: int | None) -> bool:
    """Whether the other half has a routable RoCE v2 entry at the same index, since NCCL takes one index for both."""
    return any(
        gid.index == index and gid.kind == "RoCE v2" and ipaddress.IPv6Address(gid.address).ipv4_mapped is not None
        for gid in device.gids
    )
