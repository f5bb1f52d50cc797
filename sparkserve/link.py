"""Read-only facts of the cable: which interface of each node owns the link address, its RDMA devices and GID index.

Names are never carried from one node to the other, and never taken from the default route: an address decides.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from sparkserve.cluster import ROLES, Node, Role
from sparkserve.container import LinkPlace
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError
from sparkserve.link_rdma import RDMA_GLOBS, RdmaDevice, find_gid_index, parse_rdma

_PORT_SUFFIX = re.compile(r"(f\d+np\d+|f\d+)$")
_DOMAIN = re.compile(r"^en(P\d+)?p")
# What is made of software; a veth may be a cable, but never one that hangs on a bridge or that Docker named.
_SOFT_KINDS = frozenset({"bridge", "tun", "wireguard", "dummy", "ifb", "vxlan", "macvlan", "ipvlan", "gre", "sit"})
_SOFT_NAMES = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "tailscale", "zt")
_COMMANDS = {
    "ip": ["ip", "-json", "-details", "address"],
    "routes": ["ip", "-json", "-4", "route", "show", "default"],
    "ssh": ["printenv", "SSH_CONNECTION"],
}
_GLOBS = {"wireless": "/sys/class/net/*/phy80211", "speed": "/sys/class/net/*/speed", **RDMA_GLOBS}


@dataclass(frozen=True)
class Interface:
    """One network interface; speed in Mb/s, None where the driver does not say.

    `networks` are those of `addresses`, in the same order; `soft` is what is no port of the machine.
    """

    name: str
    addresses: tuple[str, ...]
    mtu: int
    up: bool
    speed_mbps: int | None
    networks: tuple[str, ...] = ()
    soft: bool = False
    wireless: bool = False


@dataclass(frozen=True)
class LinkFacts(LinkPlace):
    """What one node knows of the cable; `interface` is empty where nothing owns the link address.

    `default_routes` are the interfaces of its default routes; `ssh` is the client's and this node's own address of the
    connection that asked, both empty where there is none.
    """

    twin: str = ""
    mtu: int = 0
    speed_mbps: int | None = None
    interfaces: tuple[Interface, ...] = ()
    devices: tuple[RdmaDevice, ...] = ()
    default_routes: tuple[str, ...] = ()
    ssh: tuple[str, str] = ("", "")

    @property
    def network(self) -> str:
        """The network of the link address, as its interface has it; empty where it is on none."""
        own = (item for item in self.interfaces if item.name == self.interface)
        pairs = ((one, network) for item in own for one, network in zip(item.addresses, item.networks, strict=False))
        return next((network for address, network in pairs if address == self.address), "")

    @property
    def cable_mbps(self) -> int | None:
        """What the cable should give by its devices: the rate of the RDMA port, else the interface's speed."""
        rates = [one.rate_mbps for one in self.devices if one.name in self.hcas and one.rate_mbps]
        return max(rates, default=self.speed_mbps)


UNSEEN = LinkFacts()


@dataclass(frozen=True)
class Management:
    """Where SSH reaches a node: its interface and address, empty where they are not known."""

    interface: str
    address: str


@dataclass(frozen=True)
class Proposal:
    """One way to name the cable in the settings; the best is first where there are several."""

    head_address: str
    worker_address: str
    head_interface: str
    worker_interface: str
    mtu: int
    speed_mbps: int | None
    rdma: bool
    why: str


def gather(node: Node, timeout: float = 60.0) -> LinkFacts:
    """Read interfaces and RDMA devices of a node in one request."""
    raw = node.session.ask("facts", timeout=timeout, commands=_COMMANDS, globs=list(_GLOBS.values()))
    return parse(raw, node.link_address)


def parse(raw: Mapping[str, Any], address: str) -> LinkFacts:
    """Work out the link of a node from its raw facts."""
    found = {name: raw["globs"][pattern] for name, pattern in _GLOBS.items()}
    interfaces = parse_interfaces(raw["commands"]["ip"], found)
    routes, ssh = _default_routes(raw["commands"]["routes"]), _ssh_addresses(raw["commands"]["ssh"])
    bare = LinkFacts(interfaces=interfaces, devices=parse_rdma(found), default_routes=routes, ssh=ssh)
    return locate(bare, address)


def locate(facts: LinkFacts, address: str) -> LinkFacts:
    """Work out which interface, devices and GID index are the cable's, by its address."""
    owner = next((item for item in facts.interfaces if address and address in item.addresses), None)
    if owner is None:
        return replace(facts, address=address)
    twin, devices = _find_twin(owner.name, facts.interfaces), facts.devices
    own = next((device for device in devices if device.interface == owner.name and device.active), None)
    index = find_gid_index(own, address, owner.name) if own else None
    halves = [item for item in devices if item.active and item.interface in (owner.name, twin)]
    halves.sort(key=lambda item: item is not own)  # the one of the link address first
    hcas = tuple(device.name for device in halves if device is own or _answers_at(device, index))
    located = replace(facts, address=address, interface=owner.name, mtu=owner.mtu, speed_mbps=owner.speed_mbps)
    return replace(located, twin=twin, hcas=hcas, gid_index=index)


def parse_interfaces(
    answer: Mapping[str, Any] | None, found: Mapping[str, Mapping[str, str | None]]
) -> tuple[Interface, ...]:
    """Read what `ip -json address` answered; no answer is not the same as no interfaces."""
    rows = _read_rows(answer, "ip -json address")
    return tuple(_interface(row, found) for row in rows if row.get("ifname") and row["ifname"] != "lo")


def _read_rows(answer: Mapping[str, Any] | None, asked: str) -> list[dict[str, Any]]:
    """Read the JSON of iproute2."""
    try:
        if answer and answer["code"] == 0:
            rows: list[dict[str, Any]] = json.loads(answer["out"])
            return rows
    except ValueError:
        pass
    message, hint = f"cannot see the network interfaces: `{asked}` gave no answer", "sudo apt-get install iproute2"
    details = answer["err"] if answer else ""
    raise SparkserveError("link_unseen", message, hint, details=details, exit_code=EXIT_COULD_NOT_LOOK)


def _interface(row: Mapping[str, Any], found: Mapping[str, Mapping[str, str | None]]) -> Interface:
    name = row["ifname"]
    own = [item for item in row.get("addr_info", ()) if item.get("family") == "inet"]
    kind = row.get("linkinfo", {}).get("info_kind", "")
    speed = (found["speed"].get(f"/sys/class/net/{name}/speed") or "").strip()
    return Interface(
        name=name,
        addresses=tuple(item["local"] for item in own),
        mtu=row.get("mtu", 0),
        up="LOWER_UP" in row.get("flags", ()),
        speed_mbps=int(speed) if speed.isdigit() else None,
        networks=tuple(_network(item["local"], item.get("prefixlen", 32)) for item in own),
        soft=kind in _SOFT_KINDS or "master" in row or name.startswith(_SOFT_NAMES),
        wireless=f"/sys/class/net/{name}/phy80211" in found["wireless"] or name.startswith("wl"),
    )


def _network(address: str, length: int) -> str:
    return str(ipaddress.IPv4Network(f"{address}/{length}", strict=False))


def _default_routes(answer: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Give the interfaces of the default routes; a node without one is no failure."""
    if answer and answer["code"] == 0 and not answer["out"].strip():  # iproute2 of old says nothing instead of []
        return ()
    rows = _read_rows(answer, "ip -json route show default")
    return tuple(dict.fromkeys(row["dev"] for row in rows if "dev" in row))


def _ssh_addresses(answer: Mapping[str, Any] | None) -> tuple[str, str]:
    """Give both ends of the SSH connection, from SSH_CONNECTION: client, its port, server, its port."""
    words = answer["out"].split() if answer and answer["code"] == 0 else []
    return (words[0], words[2]) if len(words) == 4 else ("", "")


def _find_twin(name: str, interfaces: tuple[Interface, ...]) -> str:
    """Find the other PCIe half of the same port: the same function and port number, another PCI domain."""
    port = port_of(name)
    others = [item.name for item in interfaces if item.up and item.name != name and port_of(item.name) == port]
    return others[0] if len(others) == 1 else ""


def port_of(name: str) -> str:
    """Give what the interfaces of both halves of a port share in their names; any other name stands for itself."""
    suffix = _PORT_SUFFIX.search(name)
    return suffix[1] if suffix else name


def _answers_at(device: RdmaDevice, index: int | None) -> bool:
    """Whether the other half has a routable RoCE v2 entry at the same index, since NCCL takes one index for both."""
    return any(
        gid.index == index and gid.kind == "RoCE v2" and ipaddress.IPv6Address(gid.address).ipv4_mapped is not None
        for gid in device.gids
    )


def find_management(seen: Mapping[Role, LinkFacts]) -> dict[Role, Management]:
    """Find both ends of the SSH connection to the worker; behind a jump host only the worker's end is known."""
    return {
        role: next(
            (Management(item.name, address) for item in seen[role].interfaces if address in item.addresses),
            Management("", ""),
        )
        for role, address in zip(ROLES, seen["worker"].ssh, strict=True)
        if role in seen
    }


# -- proposals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _End:
    """One address of an interface that may be an end of the cable, in its network."""

    interface: Interface
    address: str
    network: str
    rdma: bool


def propose(seen: Mapping[Role, LinkFacts], *, needs_rdma: bool = False) -> list[Proposal]:
    """Give the pairs of addresses that may be the two ends of the cable, the likeliest first.

    A link-local address gives way to a fixed one, but never a cable with RDMA to a network without.
    """
    found = [
        _proposal(head, worker)
        for head, worker in product(_ends(seen["head"]), _ends(seen["worker"]))
        if head.network == worker.network and head.address != worker.address
    ]
    fixed = [one for one in found if not ipaddress.ip_address(one.head_address).is_link_local]
    least = max((one.rdma for one in fixed), default=None)
    kept = [one for one in found if one in fixed or least is None or one.rdma > least]
    return sorted((one for one in kept if one.rdma or not needs_rdma), key=_rank)


def _ends(facts: LinkFacts) -> list[_End]:
    return [
        _End(item, address, network, _can_rdma(facts, item))
        for item in _ports(facts)
        for address, network in zip(item.addresses, item.networks, strict=True)
    ]


def _ports(facts: LinkFacts) -> list[Interface]:
    own = [item for item in facts.interfaces if item.up and not item.soft and not item.wireless]
    return [item for item in own if item.name not in facts.default_routes]


def likely_port(facts: LinkFacts) -> str:
    """Name the port that the cable is probably in, whether it has an address or not; empty where none is fit."""
    ports = sorted(_ports(facts), key=lambda item: (not _can_rdma(facts, item), bool(item.addresses), len(item.name)))
    return ports[0].name if ports else ""


def _proposal(head: _End, worker: _End) -> Proposal:
    ours, theirs, rdma = head.interface, worker.interface, head.rdma and worker.rdma
    speeds, mtu = [one.speed_mbps for one in (ours, theirs) if one.speed_mbps], min(ours.mtu, theirs.mtu)
    speed = min(speeds, default=None)
    words = [f"both in {head.network}", "RDMA on both" if rdma else "no RDMA", f"MTU {mtu}"]
    if speed:
        words.insert(2, f"{speed / 1000:g} Gb/s")
    if ipaddress.ip_address(head.address).is_link_local:
        words.append("link-local, which may change at any boot")
    return Proposal(head.address, worker.address, ours.name, theirs.name, mtu, speed, rdma, ", ".join(words))


def _can_rdma(facts: LinkFacts, interface: Interface) -> bool:
    return any(device.active and device.interface == interface.name for device in facts.devices)


def _rank(one: Proposal) -> tuple[bool, int, int, bool, int]:
    """Order by RDMA, speed and MTU; then halves that answer each other, and the first half of a port."""
    halves = [(_DOMAIN.match(name) or [""])[0] for name in (one.head_interface, one.worker_interface)]
    return not one.rdma, -(one.speed_mbps or 0), -one.mtu, halves[0] != halves[1], sum(map(len, halves))
