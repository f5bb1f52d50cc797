"""Rules over both nodes at once: what must be the same, what must differ, and the cable between them (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from sparkserve.checks import Check, Subject, verdict
from sparkserve.cluster import ROLES, Role
from sparkserve.link import LinkFacts, likely_port, propose
from sparkserve.settings import variable_name
from sparkserve.system import SystemFacts

_CLOCK_SECONDS = 2.0


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
    for name, what in (("driver_match", "driver"), ("kernel_match", "kernel"), ("docker_match", "Docker")):
        if one := found.get(what):
            unseen = not (one.head and one.worker)
            if unseen and what == "driver" and not subject.recipe.container.gpus:
                continue
            observed = f"{what}: {one.head}" if one.same else f"{what}: head {one.head}, worker {one.worker}"
            good = None if unseen else one.same
            observed = f"{what} could not be seen on both nodes" if unseen else observed
            checks.append(Check(name, "", verdict(good=good, bad="warn"), observed, "the same on both nodes"))
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
    """Check that the worker is not the head under another name: its name and every address of its interfaces."""
    if len(subject.system) < len(ROLES) or len(subject.links) < len(ROLES):
        return []
    head, worker = (
        (subject.system[role].hostname, [(one.name, one.addresses) for one in subject.links[role].interfaces])
        for role in ROLES
    )
    observed = f"both are {head[0]}, with the same addresses" if head == worker else f"{head[0]} and {worker[0]}"
    return [Check("same_machine", "", verdict(good=head != worker), observed, "two machines")]


def check_link(subject: Subject) -> list[Check]:
    """Check that each node owns its link address, both ends agree on the MTU, and RDMA devices have a GID."""
    checks = [_check_address(subject, role, facts) for role, facts in subject.links.items()]
    for role, facts in subject.links.items():
        if subject.uses_rdma and facts.interface:
            good = facts.gid_index is not None
            observed = f"no active RDMA device of {facts.interface} has a RoCE v2 address for {facts.address}"
            observed = f"{', '.join(facts.hcas)}, GID {facts.gid_index}" if good else observed
            checks.append(Check("link_rdma", role, verdict(good=good), observed, "a RoCE v2 GID of the link address"))
    sizes = {role: facts.mtu for role, facts in subject.links.items() if facts.interface}
    if len(sizes) == len(ROLES):
        shown = ", ".join(f"{role} {mtu}" for role, mtu in sizes.items())
        good = len(set(sizes.values())) == 1
        checks.append(Check("link_mtu", "", verdict(good=good), f"MTU: {shown}", "the same on both ends"))
    addresses = [facts.address for facts in subject.links.values()]
    if len(addresses) == len(ROLES) and all(addresses):
        good = addresses[0] != addresses[1]
        observed = f"the link addresses: {' and '.join(addresses)}"
        checks.append(Check("link_same", "", verdict(good=good), observed, "one address per node"))
    return checks


def _check_address(subject: Subject, role: Role, facts: LinkFacts) -> Check:
    needed = "the address of the cable's interface"
    if facts.interface:
        return Check("link_address", role, "ok", f"{facts.interface} owns {facts.address}", needed)
    key = variable_name("head_link" if role == "head" else "worker_link")
    observed = f"no interface owns {facts.address}" if facts.address else f"{key} is not set"
    return Check("link_address", role, "fail", observed, needed, _name_cable(subject) or _address_port(role, facts))


def _name_cable(subject: Subject) -> str:
    """Give the lines of `.env` that name the likeliest cable; what a node owns already of it counts most."""
    links = subject.links
    if len(links) < len(ROLES):
        return "`sparkserve link` proposes one, once both nodes answer"
    found = [one for one in propose(links) if one.rdma or not subject.uses_rdma]
    if not found:
        return ""
    owned = {facts.address for facts in links.values() if facts.interface}
    best = max(found, key=lambda one: len(owned & {one.head_address, one.worker_address}))
    lines = f"{variable_name('head_link')}={best.head_address}\n{variable_name('worker_link')}={best.worker_address}"
    return f"write to .env ({best.why}):\n{lines}"


def _address_port(role: Role, facts: LinkFacts) -> str:
    """Say how the cable gets addresses where its ends have none in one network."""
    port = likely_port(facts)
    if not port:
        return "plug the cable in on both nodes; no port of this one is up"
    command = f"sudo ip address add 10.100.8.{1 + ROLES.index(role)}/24 dev {port}"
    return f"give the cable's port an address, on both nodes in one network: {command} (netplan makes it last)"
