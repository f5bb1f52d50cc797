"""Rules over both nodes at once: what must be the same, what must differ, and the cable between them (pure)."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from sparkserve.checks import Check, Subject, could_not_look, verdict
from sparkserve.cluster import ROLES, Role
from sparkserve.link import LinkFacts, likely_port, propose
from sparkserve.link_picture import port_name, share_network
from sparkserve.settings import variable_name
from sparkserve.system import SystemFacts

_CLOCK_SECONDS = 2.0
_JUMBO = 9000
_OWNED = "the address of the cable's interface"
_ALIKE = (
    ("driver_match", "driver", "nvidia-smi"), ("kernel_match", "kernel", "uname -r"),
    ("docker_match", "Docker", "docker version"),
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """One thing that is compared between the nodes."""

    what: str
    head: str
    worker: str

    @property
    def same(self) -> bool:
        """Whether both nodes have the same of it."""
        return self.head == self.worker


def compare(subject: Subject) -> list[Difference]:
    """Put side by side what both ranks rest on; nothing where only one node was seen."""
    if len(subject.system) < len(ROLES):
        return []
    head, worker = (_named(subject.system[role]) for role in ROLES)
    return [Difference(name, head[name], worker[name]) for name in head]


def _named(facts: SystemFacts) -> dict[str, str]:
    gpu, driver = facts.gpu or ("", "")
    return {
        "system": facts.system,
        "kernel": facts.kernel,
        "kernel options": facts.kernel_options if "kho=" in facts.kernel_options else "",
        "GPU": gpu,
        "driver": driver,
        "Docker": facts.docker.version,
        "Docker's storage": facts.docker.storage,
        "python3": facts.python,
        "memory": f"{facts.memory.get('MemTotal', 0) / 2**30:.0f} GiB",
    }


def check_alike(subject: Subject) -> list[Check]:
    """Check driver, kernel and Docker of both nodes against each other."""
    found = {one.what: one for one in compare(subject)}
    checks = []
    for name, what, command in _ALIKE if found else ():
        one = found[what]
        observed = f"{what}: {one.head}" if one.same else f"{what}: head {one.head}, worker {one.worker}"
        if one.head and one.worker:
            judged = verdict(good=one.same, bad="warn")
            checks.append(Check(name, "", judged, observed, "the same on both nodes"))
        elif what != "driver" or subject.recipe.container.gpus:
            checks.append(could_not_look(name, "", command, "the same on both nodes"))
    return checks


def check_clock(subject: Subject) -> list[Check]:
    """Check how far the clocks of the nodes are apart."""
    if len(subject.system) < len(ROLES):
        return []
    head, worker = (subject.system[role].clock for role in ROLES)
    apart, margin = worker[0] - head[0], worker[1] + head[1]
    observed = f"the worker's clock is {abs(apart):.3f} s {'ahead' if apart > 0 else 'behind'}, ±{margin:.3f} s"
    good = verdict(good=abs(apart) <= _CLOCK_SECONDS + margin, bad="warn")
    return [Check("clock", "", good, observed, f"less than {_CLOCK_SECONDS:g} s apart")]


def check_same_machine(subject: Subject) -> list[Check]:
    """Check that the worker is not the head under another name: its name, or an address of its interfaces."""
    if len(subject.system) < len(ROLES):
        return []
    head, worker = (subject.system[role].hostname for role in ROLES)
    ends = [[(one.name, one.addresses) for one in link.interfaces] for link in subject.links.values()]
    if head == worker and len(ends) < len(ROLES):
        return [could_not_look("same_machine", "", "ip address", "two machines")]
    good = head != worker or ends[0] != ends[1]
    observed = f"{head} and {worker}" if good else f"both are {head}, with the same addresses"
    return [Check("same_machine", "", verdict(good=good), observed, "two machines")]


# -- the cable ---------------------------------------------------------------------------------------------------------


def check_link(subject: Subject) -> list[Check]:
    """Check that each node owns its link address by a cable of its own, and that both ends fit each other."""
    checks: list[Check] = []
    for role in ROLES:
        if (error := subject.unread.get(("link_address", role))) is not None:
            checks.append(Check("link_address", role, "unseen", error.message, _OWNED, error.hint))
        elif role in subject.links:
            checks.append(_check_address(subject, role, subject.links[role]))
    for role, link in subject.links.items():
        if link.interface:
            checks += _of_node(subject, role, link)
    links = [subject.links[role] for role in ROLES if role in subject.links]
    if len(links) == len(ROLES) and all(link.address for link in links):
        checks += _of_pair(links[0], links[1])
    return checks


def _check_address(subject: Subject, role: Role, facts: LinkFacts) -> Check:
    if facts.interface:
        return Check("link_address", role, "ok", f"{facts.interface} owns {facts.address}", _OWNED)
    key = variable_name("head_link" if role == "head" else "worker_link")
    observed = f"no interface owns {facts.address}" if facts.address else f"{key} is not set"
    return Check("link_address", role, "fail", observed, _OWNED, _name_cable(subject) or _address_port(role, facts))


def _name_cable(subject: Subject) -> str:
    """Give the lines of `.env` that name the likeliest cable; what a node owns already of it counts most."""
    links = subject.links
    if len(links) < len(ROLES):
        return "`sparkserve link` proposes one, once both nodes answer"
    found = propose(links, needs_rdma=subject.uses_rdma)
    if not found:
        return ""
    owned = {facts.address for facts in links.values() if facts.interface}
    best = max(found, key=lambda one: len(owned & {one.head_address, one.worker_address}))
    lines = f"{variable_name('head_link')}={best.head_address}\n{variable_name('worker_link')}={best.worker_address}"
    return f"write to .env ({best.head_interface} to {best.worker_interface}: {best.why}):\n{lines}"


def _address_port(role: Role, facts: LinkFacts) -> str:
    """Say how the cable gets addresses where its ends have none in one network."""
    port = likely_port(facts)
    if not port:
        return "plug the cable in on both nodes; no port of this one is up"
    command = f"sudo ip address add 10.100.8.{1 + ROLES.index(role)}/24 dev {port}"
    return f"give the cable's port an address, on both nodes in one network: {command} (netplan makes it last)"


def _of_node(subject: Subject, role: Role, link: LinkFacts) -> Iterator[Check]:
    """Judge one end: its kind, its RDMA devices, and what else goes over it."""
    own = {item.name: item for item in link.interfaces}
    wireless = link.interface in own and own[link.interface].wireless
    observed = f"{link.interface} is {'wireless and no cable' if wireless else 'no wireless one'}"
    yield Check("link_kind", role, verdict(good=not wireless), observed, "an interface with a cable")
    if subject.uses_rdma:
        yield _check_rdma(role, link)
    if link.gid_index is not None:
        good = len(link.hcas) > 1
        observed = "both halves of the port are used" if good else f"only one half of the port is used{_why_half(link)}"
        yield Check("link_halves", role, verdict(good=good, bad="warn"), observed, "both, for its whole rate")
    odd = "; ".join(_find_strays(link))
    observed = odd or f"nothing else goes over {link.interface}"
    yield Check("link_route", role, verdict(good=not odd, bad="warn"), observed, "a network for the cable alone")


def _check_rdma(role: Role, link: LinkFacts) -> Check:
    needed = "a RoCE v2 GID of the link address"
    if link.gid_index is not None:
        return Check("link_rdma", role, "ok", f"{', '.join(link.hcas)}, GID {link.gid_index}", needed)
    unread = [one.unread for one in link.devices if one.interface == link.interface and one.unread]
    if unread:
        return could_not_look("link_rdma", role, f"cat {unread[0]}", needed)
    observed = f"no active RDMA device of {link.interface} has a RoCE v2 address for {link.address}"
    return Check("link_rdma", role, "fail", observed, needed)


def _why_half(link: LinkFacts) -> str:
    if not link.twin:
        return ": the other one is down or not there"
    has_address = any(item.addresses for item in link.interfaces if item.name == link.twin)
    return f": {link.twin} has {'no GID at the same index' if has_address else 'no IPv4 address'}"


def _find_strays(link: LinkFacts) -> Iterator[str]:
    """Tell what would take the cable that should not, or leave it that should."""
    if link.interface in link.default_routes:
        yield "the default route goes over the cable"
    if ipaddress.IPv4Address(link.address).is_link_local:
        yield f"{link.address} is link-local and may be another one after a reboot"
    for item in link.interfaces:
        if item.name != link.interface and item.up and link.network in item.networks:
            yield f"{item.name} is in the network of {link.interface}, and the kernel may send from either"


def _of_pair(head: LinkFacts, worker: LinkFacts) -> Iterator[Check]:
    """Judge both ends together."""
    good = head.address != worker.address
    observed = f"the link addresses: {head.address} and {worker.address}"
    yield Check("link_same", "", verdict(good=good), observed, "one address per node")
    if not (head.interface and worker.interface):
        return
    shares = share_network(head, worker)
    ports = [port_name(link.interface) or link.interface for link in (head, worker)]
    where = f"one network, {ports[0]} to {ports[1]}" if shares else "different networks: nothing goes over the cable"
    observed = f"{head.address} and {worker.address} are in {where}"
    yield Check("link_network", "", verdict(good=shares), observed, "one network for both ends")
    same, needed = head.mtu == worker.mtu, f"the same on both ends, {_JUMBO}"
    judged = verdict(good=same and head.mtu >= _JUMBO, bad="warn" if same else "fail")
    yield Check("link_mtu", "", judged, f"MTU: head {head.mtu}, worker {worker.mtu}", needed)
