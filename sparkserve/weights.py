"""Weights on the head: what is there, what is missing, and the downloads that make it whole; proofs on both nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparkserve.cluster import ROLES, Deployment, Node, Role
from sparkserve.download import download
from sparkserve.errors import SparkserveError
from sparkserve.hub_file import Hub, HubFile
from sparkserve.inventory import (
    PARTIALS,
    Facts,
    Item,
    bytes_missing,
    find_need,
    gather,
    hash_files,
    list_items,
    only_needs_proof,
    prove,
    settle,
    tidy,
)
from sparkserve.manifest import ManifestFile, is_proved
from sparkserve.node_copy import Copy, copy
from sparkserve.partial import JOURNAL_SUFFIX
from sparkserve.plan import ApplyReport, Change, Plan, Work

__all__ = ["Facts", "Finding", "Verification", "bytes_missing", "gather", "plan", "tidy", "verify"]


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan what makes the head's files whole: from the worker where that one holds them proved, else from the hub."""
    hub = Hub(deployment.settings)
    changes = []
    for item in list_items(deployment.lock):
        need = find_need(item, facts["head"], deployment.cluster.head)
        if need is None:
            continue
        hash_first = only_needs_proof(item, facts["head"])
        from_worker = is_proved(item.file, facts["worker"].of(item))
        job = _HeadFile(deployment, hub, item, hash_first, from_worker)
        lane = "hash" if hash_first else "copy" if from_worker else "download"
        after = f"{item.proof} (from the worker)" if lane == "copy" else item.proof
        changes.append(
            Change("head", "download", item.resource, need, after, job.make_right, lane=lane, size=item.file.size)
        )
    return changes


@dataclass(frozen=True)
class _HeadFile:
    """What makes one file of the head right."""

    deployment: Deployment
    hub: Hub
    item: Item
    hash_first: bool
    from_worker: bool

    def make_right(self, work: Work) -> str:
        """Prove what is there; fetch it where that is not enough."""
        head, item = self.deployment.cluster.head, self.item
        if self.hash_first:
            if prove(head, item, work):
                return f"{item.file.size} bytes, {item.proof}"
            work.note("wrong content: fetching it")
        origin = "the worker" if self.from_worker and self._copy_from_worker(work) else "the hub"
        if origin == "the hub":
            wanted = HubFile(item.manifest.repository, item.manifest.commit, item.file)
            download(self.hub, wanted, Path(item.partial_path(head)), work)
        proof = settle(head, item, work)
        Path(item.partial_path(head) + JOURNAL_SUFFIX).unlink(missing_ok=True)
        return f"{proof}, from {origin}"

    def _copy_from_worker(self, work: Work) -> bool:
        cluster, item = self.deployment.cluster, self.item
        path = cluster.worker.place(item.manifest, item.file)
        try:
            copy(Copy(cluster.worker, path, cluster.head, item.partial_path(cluster.head), item.file), work)
        except SparkserveError as error:
            work.note(f"not from the worker ({error.message}), so from the hub")
            return False
        return True


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
        items = [item for item in list_items(deployment.lock) if only_needs_proof(item, facts[node.role])]
        items = [item for item in items if full or facts[node.role].of(item).digest is None]
        if items:
            files = {node.place(item.manifest, item.file): item.file for item in items}
            action = partial(_hash, node, files)
            size = sum(item.file.size for item in items)
            yield Change(node.role, "verify", f"{len(items)} files", "not proved", "read", action, size=size)


def _hash(node: Node, files: Mapping[str, ManifestFile], work: Work) -> str:
    total = sum(file.size for file in files.values())

    def tell(done: int) -> None:
        work.check()
        work.progress(done, total)

    hash_files(node, files, tell)
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
    names: list[str] = []
    directories = sorted({manifest.directory for manifest in deployment.lock.weights})
    words = ["-name", PARTIALS, "-prune", "-o", "-not", "-type", "d", "-print0"]
    commands = {directory: ["find", f"{node.models_dir}/{directory}", *words] for directory in directories}
    answers = node.session.ask("facts", commands=commands)["commands"]
    for directory in directories:
        paths = (answers[directory] or {"out": ""})["out"].split("\0")
        names += [path.removeprefix(f"{node.models_dir}/") for path in sorted(filter(None, paths))]
    return names
