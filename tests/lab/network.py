"""The cables of the lab: names and addresses of both nodes, the link between them, and the management network.

The link is made of veth pairs straight from node to node. The management network is a bridge in a namespace of its own,
so that no firewall rule, forwarding switch or bridge filter of the machine has a say; the machine has one port on it.
"""

import json
import os
from dataclasses import dataclass
from ipaddress import IPv4Network

from tests.lab.machine import LabError, command

LINK_MTU = 9000


@dataclass(frozen=True)
class Port:
    """One PCIe function of a QSFP port: its interface, its RDMA device, and whether the cable is in."""

    interface: str
    rdma_device: str
    cabled: bool


@dataclass(frozen=True)
class Role:
    """What differs between the two nodes before anything is running; the cable joins different ports on purpose."""

    name: str
    host_number: int
    gid_index: int
    ports: tuple[Port, Port, Port, Port]  # link and twin (cabled), then the two of the empty port
    management_interface: str = "enP7s7"


FIRST = (("enp1s0f0np0", "rocep1s0f0"), ("enP2p1s0f0np0", "roceP2p1s0f0"))
SECOND = (("enp1s0f1np1", "rocep1s0f1"), ("enP2p1s0f1np1", "roceP2p1s0f1"))


def _ports(
    cabled: tuple[tuple[str, str], tuple[str, str]], empty: tuple[tuple[str, str], tuple[str, str]]
) -> tuple[Port, Port, Port, Port]:
    (link, twin), (spare, spare_twin) = cabled, empty
    return (
        Port(*link, cabled=True),
        Port(*twin, cabled=True),
        Port(*spare, cabled=False),
        Port(*spare_twin, cabled=False),
    )


ROLES = {
    "head": Role("head", 11, 3, _ports(SECOND, FIRST)),
    "worker": Role("worker", 12, 5, _ports(FIRST, SECOND)),
}


@dataclass(frozen=True)
class Subnets:
    """The three networks of one lab."""

    management: IPv4Network
    link: IPv4Network
    twin: IPv4Network

    @property
    def gateway(self) -> str:
        """The machine's own address on the management network."""
        return str(self.management[1])

    def addresses(self, role: Role) -> tuple[str, str, str]:
        """Management, link and twin address of a node."""
        management, link, twin = (str(net[role.host_number]) for net in (self.management, self.link, self.twin))
        return management, link, twin


def choose_subnets(seed: int) -> Subnets:
    """Take three neighbouring private /24 networks that no route or address of the machine touches."""
    taken = _networks_in_use()
    for attempt in range(1024):
        base = (seed + attempt) % 4096 * 4
        nets = [IPv4Network(f"10.{64 + base // 256}.{base % 256 + offset}.0/24") for offset in range(3)]
        if not any(net.overlaps(used) for net in nets for used in taken):
            return Subnets(*nets)
    raise LabError("no free private networks on this machine")


def _networks_in_use() -> list[IPv4Network]:
    routes = json.loads(command("ip", "-json", "-4", "route", "show", "table", "all"))
    destinations = {route["dst"] for route in routes} - {"default"}
    return [IPv4Network(destination, strict=False) for destination in destinations]


@dataclass(frozen=True)
class Wiring:
    """One lab's cables, by the processes that hold the network namespaces."""

    subnets: Subnets
    uplink: str  # the machine's own interface
    switch: int
    nodes: dict[str, int]

    def connect(self) -> None:
        """Lay all cables and give every interface its address."""
        self._build_switch()
        head, worker = self.nodes["head"], self.nodes["worker"]
        cables = list(zip(ROLES["head"].ports, ROLES["worker"].ports, strict=True))
        _ip(head, [_veth(ours.interface, theirs.interface, worker) for ours, theirs in cables])
        for name, pid in self.nodes.items():
            _ip(pid, _node_settings(ROLES[name], self.subnets))

    def _build_switch(self) -> None:
        ports = {name: ROLES[name].management_interface for name in self.nodes}
        lines = ["link set lo up", "link add management type bridge", "link set management up"]
        lines += [_veth(name, ports[name], pid) for name, pid in self.nodes.items()]
        lines.append(_veth("machine", self.uplink, os.getpid()))
        for port in (*self.nodes, "machine"):
            lines += [f"link set {port} master management", f"link set {port} up"]
        _ip(self.switch, lines)
        prefix = self.subnets.management.prefixlen
        command("ip", "address", "add", f"{self.subnets.gateway}/{prefix}", "dev", self.uplink)
        command("ip", "link", "set", self.uplink, "up")


def remove_uplink(uplink: str) -> None:
    """Remove the machine's interface; the kernel drops it with the switch, but only some time later."""
    names = {link["ifname"] for link in json.loads(command("ip", "-json", "link", "show"))}
    if uplink not in names:
        return
    try:
        command("ip", "link", "delete", uplink)
    except LabError as error:
        if "Cannot find device" not in str(error):
            raise


def _veth(name: str, peer: str, peer_pid: int) -> str:
    return f"link add {name} type veth peer name {peer} netns {peer_pid}"


def _ip(pid: int, lines: list[str]) -> None:
    command("nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-", text="\n".join(lines) + "\n")


def _node_settings(role: Role, subnets: Subnets) -> list[str]:
    management, link, twin = subnets.addresses(role)
    cabled = [port.interface for port in role.ports if port.cabled]
    interfaces = {role.management_interface: management, cabled[0]: link, cabled[1]: twin}
    lines = ["link set lo up"]
    lines += [f"link set {port.interface} mtu {LINK_MTU}" for port in role.ports]
    for interface, address in interfaces.items():
        lines += [f"address add {address}/24 dev {interface}", f"link set {interface} up"]
    return [*lines, f"route add default via {subnets.gateway}"]
