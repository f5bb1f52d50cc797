"""Rules over both nodes at once: what must be the same, and what must differ (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from sparkserve.checks import Check, Subject, could_not_look, verdict
from sparkserve.cluster import ROLES
from sparkserve.system import SystemFacts

_CLOCK_SECONDS = 2.0
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
