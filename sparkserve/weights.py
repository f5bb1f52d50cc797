"""Weights on both nodes: what is there, what is missing, what makes it whole, and proofs of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sparkserve.cluster import ROLES, Cluster, Deployment, Node, Role
from sparkserve.download import download
from sparkserve.errors import SparkserveError
from sparkserve.hub_file import Hub
from sparkserve.inventory import (
    PARTIALS,
    Facts,
    Item,
    bytes_missing,
    find_command,
    find_need,
    found_lines,
    gather,
    hash_files,
    list_items,
    only_needs_proof,
    prove,
    settle,
    tidy,
)
from sparkserve.manifest import ManifestFile, find_problem, is_proved
from sparkserve.node_copy import Copy, copy
from sparkserve.plan import ApplyReport, Change, Plan, Work, key_of

__all__ = ["Facts", "Finding", "Verification", "bytes_missing", "gather", "plan", "tidy", "verify"]


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan what makes the files of both nodes whole; each of the worker waits only for its own on the head.

    The head takes from the worker what lies there in the right size (proved, where a download of it is under way, which
    the copy would throw away), else from the hub; the worker from the head.
    """
    hub, found = Hub(deployment.settings), []
    for node in deployment.cluster.nodes:
        for item in list_items(deployment.lock):
            need = find_need(item, facts[node.role], node)
            from_peer = node.role == "worker" or _is_to_copy(item, facts)
            job = _File(deployment.cluster, hub, node, item, only_needs_proof(item, facts[node.role]), from_peer)
            found += [job.change(need)] if need else []
    return found


def _is_to_copy(item: Item, facts: Mapping[Role, Facts]) -> bool:
    """Whether the head is to take a file from the worker."""
    if item.name in facts["head"].downloads:
        return is_proved(item.file, facts["worker"].of(item))
    return only_needs_proof(item, facts["worker"])


@dataclass(frozen=True)
class _File:
    """What makes one file of a node right."""

    cluster: Cluster
    hub: Hub
    node: Node
    item: Item
    hash_first: bool
    from_peer: bool

    def change(self, need: str) -> Change:
        """Plan it."""
        item, on_head = self.item, self.node.role == "head"
        lane = "hash" if self.hash_first else "copy" if self.from_peer else "download"
        return Change(
            self.node.role,
            "download" if on_head else "sync",
            item.resource,
            need,
            f"{item.proof} (from the worker)" if on_head and lane == "copy" else item.proof,
            self.make_right,
            needs=() if on_head else (key_of("head", "download", item.resource),),
            lane=lane,
            size=item.file.size,
        )

    def make_right(self, work: Work) -> str:
        """Prove what is there; bring it where that is not enough."""
        if self.hash_first:
            problem = prove(self.node, self.item, work)
            if not problem:
                return f"{self.item.file.size} bytes, {self.item.proof}"
            work.note(f"{problem}: fetching it")
        origin = self._bring(work)
        return f"{settle(self.node, self.item, work)}, from {origin}"

    def _bring(self, work: Work) -> str:
        """Fill the partial, and tell from where; only the head may ask the hub."""
        head, worker = self.cluster.nodes
        if head.session.ask("serves"):
            os.nice(19)  # this thread, and all threads and processes that it starts from now on
        item, partial_path = self.item, self.item.partial_path(self.node)
        if self.from_peer:
            source = worker if self.node is head else head
            path = source.place(item.manifest, item.file)
            try:
                copy(Copy(source, path, self.node, partial_path, item.file), work)
            except SparkserveError as error:
                if self.node is worker:
                    raise
                work.note(f"not from the worker ({error.message}), so from the hub")
            else:
                return f"the {source.role}"
        download(self.hub, item, Path(partial_path), work)
        return "the hub"


@dataclass(frozen=True)
class Finding:
    """Something wrong with one file of one node; `extra` files are told and left alone."""

    node: Role
    path: str
    problem: str
    place: str = ""


@dataclass(frozen=True)
class Verification:
    """What a look at the weights of both nodes found; `hashed` is how many bytes had to be read for it."""

    findings: tuple[Finding, ...]
    files: int
    hashed: int
    repaired: tuple[Finding, ...] = ()

    @property
    def wrong(self) -> tuple[Finding, ...]:
        """What keeps the weights from being whole; files beside them do not."""
        return tuple(finding for finding in self.findings if finding.problem != "extra")

    @property
    def holds(self) -> bool:
        """Whether every wanted file is proved on both nodes."""
        return not self.wrong


def verify(
    deployment: Deployment,
    carry_out: Callable[[Plan], ApplyReport],
    *,
    full: bool = False,
) -> Verification:
    """Prove every wanted file on both nodes side by side; `full` reads also what was proved before."""
    look = partial(gather, lock=deployment.lock)
    facts = deployment.cluster.on_both(look)
    reading = Plan(tuple(_plan_hashing(deployment, facts, full=full)))
    carry_out(reading).raise_failures()
    if not reading.is_empty:
        facts = deployment.cluster.on_both(look)
    found = deployment.cluster.on_both(lambda node: _findings(node, deployment, facts[node.role]))
    rows = tuple(finding for role in ROLES for finding in found[role])
    return Verification(rows, len(list_items(deployment.lock)), sum(change.size for change in reading.changes))


def _plan_hashing(deployment: Deployment, facts: Mapping[Role, Facts], *, full: bool) -> Iterator[Change]:
    """Plan one request a node, which reads its files side by side."""
    for node in deployment.cluster.nodes:
        seen = facts[node.role]
        items = [item for item in list_items(deployment.lock) if full or seen.of(item).digest is None]
        items = [item for item in items if find_problem(item.file, replace(seen.of(item), digest=None)) is None]
        if items:
            files = {node.place(item.manifest, item.file): item.file for item in items}
            action = partial(_hash, node, files)
            size = sum(item.file.size for item in items)
            yield Change(node.role, "verify", f"{len(items)} files", "not proved", "read", action, size=size)


def _hash(node: Node, files: Mapping[str, ManifestFile], work: Work) -> str:
    hash_files(node, files, work)
    return f"{len(files)} files read"


def _findings(node: Node, deployment: Deployment, facts: Facts) -> list[Finding]:
    items = list_items(deployment.lock)
    needs = [(item, find_need(item, facts, node)) for item in items]
    wrong = [Finding(node.role, item.name, need, node.place(item.manifest, item.file)) for item, need in needs if need]
    known = {item.name for item in items}
    extra = [name for name in _list_files(node, deployment) if name not in known]
    return wrong + [Finding(node.role, name, "extra", f"{node.models_dir}/{name}") for name in extra]


def _list_files(node: Node, deployment: Deployment) -> list[str]:
    """List what lies in the directories of the wanted commits, our own hidden partials apart."""
    words = ("-name", PARTIALS, "-prune", "-o", "-not", "-type", "d", "-print0")
    places = sorted({f"{node.models_dir}/{manifest.directory}" for manifest in deployment.lock.weights})
    commands = {place: find_command(place, *words) for place in places}
    answers = node.session.ask("facts", commands=commands)["commands"]
    paths = [path for place in places for path in found_lines(node, answers[place])]
    return [path.removeprefix(f"{node.models_dir}/") for path in paths]
