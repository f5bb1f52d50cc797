"""Weights on the head: what is there, what is missing, and the downloads that make it whole; proofs on both nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkserve.cluster import Deployment, Node, Role
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
    list_items,
    only_needs_proof,
    prove,
    settle,
)
from sparkserve.manifest import FileFacts, find_problem, is_proved
from sparkserve.node_copy import Copy, copy
from sparkserve.partial import JOURNAL_SUFFIX
from sparkserve.plan import Change, Work

__all__ = ["Facts", "Finding", "Verification", "bytes_missing", "gather", "plan", "verify"]


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan what makes the head's files whole: from the worker where that one holds them proved, else from the hub."""
    hub = Hub(deployment.settings)
    changes = []
    for item in list_items(deployment.lock):
        need = find_need(item, facts["head"])
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


@dataclass(frozen=True)
class Verification:
    """What a look at the weights of both nodes found; `hashed` is how many bytes had to be read for it."""

    findings: tuple[Finding, ...]
    files: int
    hashed: int

    @property
    def holds(self) -> bool:
        """Whether every wanted file is proved on both nodes."""
        return all(finding.problem == "extra" for finding in self.findings)


def verify(
    deployment: Deployment,
    *,
    full: bool = False,
    gentle: bool = False,
    on_progress: Callable[[Role, int, int], None] = lambda _role, _done, _total: None,
) -> Verification:
    """Prove every wanted file on both nodes side by side; `full` reads also what was proved before."""
    lock = deployment.lock
    hashed: dict[Role, int] = {}
    telling = threading.Lock()

    def look(node: Node) -> list[Finding]:
        facts = gather(node, lock)
        items = [item for item in list_items(lock) if only_needs_proof(item, facts)]
        items = [item for item in items if full or facts.of(item).digest is None]
        total = hashed[node.role] = sum(item.file.size for item in items)

        def tell(progress: dict[str, int]) -> None:
            with telling:
                on_progress(node.role, progress["bytes"], total)

        files = {**facts.files, **_hash(node, items, gentle=gentle, tell=tell)}
        return _findings(node, deployment, Facts(files, facts.partial_bytes))

    found = deployment.cluster.on_both(look)
    rows = tuple(finding for role in ("head", "worker") for finding in found[role])
    return Verification(rows, len(list_items(lock)), sum(hashed.values()))


def _hash(
    node: Node, items: list[Item], *, gentle: bool, tell: Callable[[dict[str, int]], None]
) -> dict[str, FileFacts]:
    paths = {item.name: node.place(item.manifest, item.file) for item in items}
    wanted = [{"path": paths[item.name], "algorithm": item.file.algorithm, "size": item.file.size} for item in items]
    if not wanted:
        return {}
    rows = node.session.ask("hash", store=node.proofs_file, files=wanted, gentle=gentle, on_progress=tell)
    return {
        name: FileFacts(row["kind"], row["size"], row["digest"])
        for name, row in ((n, rows[p]) for n, p in paths.items())
    }


def _findings(node: Node, deployment: Deployment, facts: Facts) -> list[Finding]:
    items = list_items(deployment.lock)
    problems = [(item.name, find_problem(item.file, facts.of(item))) for item in items]
    wrong = [Finding(node.role, name, problem) for name, problem in problems if problem]
    known = {item.name for item in items}
    extra = [Finding(node.role, name, "extra") for name in _list_files(node, deployment) if name not in known]
    return wrong + extra


def _list_files(node: Node, deployment: Deployment) -> list[str]:
    """List what lies in the directories of the wanted commits, our own hidden partials apart."""
    names: list[str] = []
    directories = sorted({manifest.directory for manifest in deployment.lock.weights})
    commands = {
        directory: [
            "find",
            f"{node.models_dir}/{directory}",
            "-name",
            PARTIALS,
            "-prune",
            "-o",
            "-not",
            "-type",
            "d",
            "-print0",
        ]
        for directory in directories
    }
    answers = node.session.ask("facts", commands=commands)["commands"]
    for directory in directories:
        paths = (answers[directory] or {"out": ""})["out"].split("\0")
        names += [path.removeprefix(f"{node.models_dir}/") for path in sorted(filter(None, paths))]
    return names
