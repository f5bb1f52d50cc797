"""What a check is, what checks judge, and what becomes of those that fail; the rules are in *_checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparkserve.check_catalog import CATALOG
from sparkserve.cluster import Role
from sparkserve.errors import EXIT_NOT_READY, Failures, SparkserveError
from sparkserve.link import LinkFacts
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings
from sparkserve.system import SystemFacts

Verdict = Literal["ok", "warn", "fail", "unseen"]
GIB = 1024**3


@dataclass(frozen=True)
class Check:
    """One rule applied to one node, or to the pair where `node` is empty; `unseen` is "could not look"."""

    id: str
    node: str
    verdict: Verdict
    observed: str
    needed: str
    hint: str = ""

    @property
    def advice(self) -> str:
        """What to type next: for this node, else for any that has this trouble."""
        known = CATALOG[self.id].fix if self.id in CATALOG and self.verdict != "ok" else ""
        return self.hint or known


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that will be written on a node below one of its places (models, cache, docker)."""

    node: Role
    place: str
    size: int
    what: str


@dataclass(frozen=True)
class Subject:
    """All that the checks judge: what is wanted, and what was seen of the nodes that could be looked at.

    `rooted` are the nodes that need root for what is planned, and whether their sudo password is known; None where
    nothing is planned. `unread` says by check and node why a file or an answer could not be read.
    """

    settings: Settings
    recipe: Recipe
    system: Mapping[Role, SystemFacts]
    links: Mapping[Role, LinkFacts] = field(default_factory=dict)
    needs: tuple[DiskNeed, ...] = ()
    rooted: Mapping[Role, bool] | None = None
    unread: Mapping[tuple[str, str], SparkserveError] = field(default_factory=dict)

    @property
    def uses_rdma(self) -> bool:
        """Whether the recipe's ranks talk over RDMA."""
        return "/dev/infiniband" in self.recipe.container.devices


def verdict(*, good: bool | None, bad: Verdict = "fail") -> Verdict:
    """Give the verdict of what was seen; None is what could not be."""
    return "unseen" if good is None else "ok" if good else bad


def could_not_look(name: str, node: str, command: str, needed: str) -> Check:
    """Say that nothing could be seen, and what shows on that node why."""
    return Check(name, node, "unseen", f"`{command}` does not tell", needed, f"type `{command}` on that node")


def raise_failures(checks: Iterable[Check], refusals: Iterable[SparkserveError] = ()) -> None:
    """Raise every failed check, behind what else refuses, as one error that lists them all."""
    failed = [*refusals]
    failed += [
        SparkserveError(
            f"check_{check.id}",
            f"{check.observed}; needed: {check.needed}",
            check.advice,
            check.node,
            exit_code=EXIT_NOT_READY,
        )
        for check in checks
        if check.verdict == "fail"
    ]
    if failed:
        raise Failures(failed)


def show_size(size: float) -> str:
    """Show bytes in GB and GiB, since a mix-up of the two decides whether 500 are enough."""
    if size < 100_000_000:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e9:.1f} GB ({size / GIB:.1f} GiB)"
