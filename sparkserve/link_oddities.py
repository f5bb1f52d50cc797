"""What is odd about the cable, in words: not wrong enough to stop a start, or the reason why one would fail (pure)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from sparkserve.cluster import ROLES, Role
from sparkserve.link_picture import port_name, share_network

if TYPE_CHECKING:
    from sparkserve.link import Interface, LinkFacts, Management

Links = Mapping[Role, "LinkFacts"]
_JUMBO = 9000
_DOCS = "docs/network.md"


def find_oddities(links: Links, management: Mapping[Role, Management]) -> list[str]:
    """List what is odd, each in one line that says what it means."""
    found = [line for role in ROLES for line in _of_node(role, links[role], management[role])]
    if all(links[role].interface for role in ROLES):
        found += _of_pair(links["head"], links["worker"])
    return found


def _of_node(role: Role, link: LinkFacts, management: Management) -> Iterator[str]:
    if not link.interface:
        why = f"no interface owns {link.address}" if link.address else "its link address is not set"
        yield f"{role}: {why}"
        return
    own = {item.name: item for item in link.interfaces}
    if link.interface in link.default_routes:
        yield f"{role}: the default route goes over the cable; whatever is not on a network of its own takes it"
    if management.interface == link.interface:
        yield f"{role}: SSH goes over the cable as well"
    if ipaddress.IPv4Address(link.address).is_link_local:
        yield f"{role}: {link.address} is link-local and may be another one after a reboot; see {_DOCS}"
    if link.devices and link.gid_index is None:
        yield f"{role}: {link.interface} has no RoCE v2 GID of {link.address}, so RDMA cannot use it"
    elif link.devices and len(link.hcas) < 2:
        yield f"{role}: only one half of the port is used, which is half of its rate{_why_half(link, own)}"
    if own[link.interface].wireless:
        yield f"{role}: {link.interface} is wireless and no cable"
    if link.mtu < _JUMBO:
        yield f"{role}: MTU {link.mtu}; {_JUMBO} moves more, see {_DOCS}"
    yield from _shared_network(role, link, own)


def _why_half(link: LinkFacts, own: Mapping[str, Interface]) -> str:
    if not link.twin:
        return ": the other one is down or not there"
    if not own[link.twin].addresses:
        return f": {link.twin} has no IPv4 address"
    return f": {link.twin} has no GID at the same index"


def _shared_network(role: Role, link: LinkFacts, own: Mapping[str, Interface]) -> Iterator[str]:
    """Tell of other interfaces in the link's network: the kernel then chooses by itself which one it sends from."""
    owner = own[link.interface]
    networks = {network for address, network in zip(owner.addresses, owner.networks, strict=False)}
    for item in own.values():
        if item.name != link.interface and item.up and networks.intersection(item.networks):
            yield f"{role}: {item.name} is in the network of {link.interface}, and the kernel may send from either"


def _of_pair(head: LinkFacts, worker: LinkFacts) -> Iterator[str]:
    if head.address == worker.address:
        yield "both link addresses are the same"
    if not share_network(head, worker):
        yield f"{head.address} and {worker.address} are in different networks: nothing goes over the cable"
    if head.mtu != worker.mtu:
        yield f"the MTU is {head.mtu} on the head and {worker.mtu} on the worker: large packets are lost"
    if head.speed_mbps and worker.speed_mbps and head.speed_mbps != worker.speed_mbps:
        yield f"the head says {head.speed_mbps / 1000:g} Gb/s and the worker {worker.speed_mbps / 1000:g}"
    ports = [port_name(link.interface) for link in (head, worker)]
    if all(ports) and ports[0] != ports[1]:
        yield f"the cable joins {ports[0]} of the head and {ports[1]} of the worker, which is fine"
