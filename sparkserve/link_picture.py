"""The cable and the management network as a picture for a terminal (pure)."""

from __future__ import annotations

import ipaddress
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from sparkserve.cluster import ROLES, Role

if TYPE_CHECKING:
    from sparkserve.link import Interface, LinkFacts, Management

WIDTH = 100
_NARROWEST = 76
_GAP = 6
_ASCII = str.maketrans("┌┐└┘├┤╞╡─│═…", "++++++++-|=~")
_PORT = re.compile(r"f\d+(?:np(\d+))?$")
_LEGEND = """
  ══ the cable: NCCL, the ranks' meeting port, weights, engine image
  ── management: SSH and control{way}"""


def draw(
    names: Mapping[Role, str],
    links: Mapping[Role, LinkFacts],
    management: Mapping[Role, Management],
    *,
    plain: bool,
    width: int = WIDTH,
) -> str:
    """Draw the cable's two halves, the other ports and management of both nodes; `plain` is ASCII only.

    The nodes stand side by side in `width` columns; where that is too narrow each is a list.
    """
    titles = [f"{role}: {names[role]}" for role in ROLES]
    sections = [_sections(links[role], management[role]) for role in ROLES]
    if width < _NARROWEST:
        lists = zip(titles, sections, strict=True)
        return "\n".join(
            line for title, parts in lists for line in (title, *(f"  {row}" for part in parts for row in part))
        )
    inner = (min(width, WIDTH) - _GAP) // 2 - 4  # a box has two of frame and blank each side
    is_joined = share_network(*(links[role] for role in ROLES))
    lines = [_edge("┌┐", titles, inner)]
    for number, (ours, theirs) in enumerate(zip(*sections, strict=True)):
        joint = _JOINTS[number] if ours and theirs and (is_joined or "═" not in _JOINTS[number]) else "│ │"
        for row, texts in enumerate(zip_longest(_fold(ours, inner), _fold(theirs, inner), fillvalue="")):
            lines.append(_row(texts, "│ │" if row else joint, inner))
    ends = [management[role].address for role in ROLES]
    lines += [_edge("└┘", ["", ""], inner), _LEGEND.format(way=", {} to {}".format(*ends) if all(ends) else "")]
    text = "\n".join(lines)
    return text.translate(_ASCII) if plain else text


# How the sections of both nodes are joined: the port's name, its halves, other ports, and management.
_JOINTS = ("│ │", "╞═╡", "╞═╡", "│ │", "│ │", "├─┤")


def _sections(link: LinkFacts, management: Management) -> list[list[str]]:
    own = {item.name: item for item in link.interfaces}
    port = port_name(link.interface)
    title = (f"{port}: the cable" if port else "the cable") if link.interface else "the cable is not known"
    home = [f"  {management.interface}  {management.address}"] if management.interface else ["  not known"]
    if management.interface in link.default_routes:
        home[0] += "  default route"
    home += [f"  default route: {name}" for name in link.default_routes if name != management.interface]
    return [
        [title],
        _half(link, own.get(link.interface)),
        _half(link, own.get(link.twin)),
        _other_ports(link, own),
        ["management"],
        home,
    ]


def _half(link: LinkFacts, interface: Interface | None) -> list[str]:
    """Show one half of the cabled port: interface and address, speed and MTU, RDMA device."""
    if interface is None:
        return []
    speed = f"{interface.speed_mbps / 1000:g} Gb/s, " if interface.speed_mbps else ""
    lines = [f"  {interface.name}  {' '.join(interface.addresses) or 'no IPv4 address'}"]
    lines.append(f"    {speed}MTU {interface.mtu}")
    device = next((item for item in link.devices if item.interface == interface.name), None)
    if device is not None:
        rate = f" at {device.rate_mbps / 1000:g} Gb/s" if device.rate_mbps else ""
        used = f"{rate}, GID index {link.gid_index}" if device.name in link.hcas else ", not used"
        lines.append(f"    {device.name}{used if device.active else ', down'}")
    return lines


def _other_ports(link: LinkFacts, own: Mapping[str, Interface]) -> list[str]:
    """Show the RDMA ports that are not the cable's."""
    ports: dict[str, list[Interface]] = {}
    for device in link.devices:
        if device.interface in own and device.interface not in (link.interface, link.twin):
            ports.setdefault(port_name(device.interface), []).append(own[device.interface])
    lines = []
    for port, halves in sorted(ports.items()):
        lines.append(f"{port}: {'up, not used' if any(half.up for half in halves) else 'no cable'}")
        first_half_first = sorted(halves, key=lambda half: len(half.name))
        addressed = [f"  {half.name}  {' '.join(half.addresses)}" for half in first_half_first if half.addresses]
        lines += addressed or [f"  {', '.join(half.name for half in first_half_first)}"]
    return lines


def share_network(head: LinkFacts, worker: LinkFacts) -> bool:
    """Whether each link address is in the other's network, so that what is sent to the other end takes the cable."""
    return all(
        link.network and other.address and ipaddress.ip_address(other.address) in ipaddress.ip_network(link.network)
        for link, other in ((head, worker), (worker, head))
    )


def port_name(interface: str) -> str:
    """Name the QSFP port of an interface by its suffix, which both PCIe halves share; other interfaces have none."""
    match = _PORT.search(interface)
    return f"port {match[1] or match[0][1:]}" if match else ""


def _edge(corners: str, titles: Sequence[str], inner: int) -> str:
    left, right = corners[0], corners[1]
    boxes = [left + (f"─ {_cut(title, inner - 2)} " if title else "").ljust(inner + 2, "─") + right for title in titles]
    return (" " * _GAP).join(boxes)


def _row(texts: Sequence[str], joint: str, inner: int) -> str:
    ours, theirs = (text.ljust(inner) for text in texts)
    left, middle, right = joint[0], joint[1], joint[2]
    return f"│ {ours} {left}{middle * _GAP}{right} {theirs} │"


def _fold(lines: Sequence[str], inner: int) -> list[str]:
    """Break what is too long for a box; nothing is left out."""
    return [part for line in lines for part in textwrap.wrap(line, inner, subsequent_indent=" " * 6)]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
