"""Weights on the worker: each proved file of the head goes there over the link and is proved again where it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparkserve.cluster import Deployment, Role
from sparkserve.inventory import Facts, Item, find_need, list_items, only_needs_proof, prove, settle
from sparkserve.node_copy import Copy, copy
from sparkserve.plan import Change, Work, key_of


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan what makes the worker's files whole; each waits only for its own file on the head."""
    changes = []
    for item in list_items(deployment.lock):
        need = find_need(item, facts["worker"], deployment.cluster.worker)
        if need is None:
            continue
        job = _WorkerFile(deployment, item, only_needs_proof(item, facts["worker"]))
        changes.append(
            Change(
                "worker",
                "sync",
                item.resource,
                need,
                item.proof,
                job.make_right,
                needs=(key_of("head", "download", item.resource),),
                lane="hash" if job.hash_first else "copy",
                size=item.file.size,
            )
        )
    return changes


@dataclass(frozen=True)
class _WorkerFile:
    """What makes one file of the worker right."""

    deployment: Deployment
    item: Item
    hash_first: bool

    def make_right(self, work: Work) -> str:
        """Prove what is there; copy it from the head where that is not enough."""
        cluster, item = self.deployment.cluster, self.item
        if self.hash_first:
            if prove(cluster.worker, item, work):
                return f"{item.file.size} bytes, {item.proof}"
            work.note("wrong content: copying it")
        path = cluster.head.place(item.manifest, item.file)
        copy(Copy(cluster.head, path, cluster.worker, item.partial_path(cluster.worker), item.file), work)
        return f"{settle(cluster.worker, item, work)}, over the link"
