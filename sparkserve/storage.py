"""The stories of what lies on both nodes' disks: prove the weights, list them, remove what is not needed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sparkserve import derive, engine, image, inventory, prune, weights
from sparkserve.cluster import ROLES, Deployment, Node, Role, pair_lock
from sparkserve.container import image_id
from sparkserve.lifecycle import Outcome, Session, carry_out, deployed, run_steps, unlock_sudo
from sparkserve.manifest import is_proved
from sparkserve.plan import Change, Plan
from sparkserve.recipe import render


def verify_weights(session: Session, *, full: bool, repair: bool) -> weights.Verification:
    """Prove the weights of both nodes without the network; `repair` then fetches what is wrong, and looks again."""
    with deployed(session, offline=True) as (deployment, _):
        act = partial(carry_out, session, deployment)
        found = weights.verify(deployment, act, full=full, gentle=_serving(deployment))
    if found.holds or not repair:
        return found
    session.voice.say(f"repairing {len(found.wrong)} files")
    run_steps(session, ("download", "sync"))
    again = verify_weights(session, full=False, repair=False)
    return weights.Verification(again.findings, again.files, found.hashed, found.wrong)


def _serving(deployment: Deployment) -> list[Role]:
    """List the nodes whose engine must not be disturbed; one that cannot be asked may serve as well."""
    facts, _ = deployment.cluster.try_both(engine.gather)
    idle = [role for role, found in facts.items() if not any(one.is_running for one in found.containers)]
    return [role for role in ROLES if role not in idle]


@dataclass(frozen=True)
class WeightsSet:
    """The files of one source on one node; sizes in bytes."""

    node: Role
    source: str
    commit: str
    files: int
    whole: int
    proved: int
    adopted: int
    size: int
    missing: int


def list_weights(session: Session) -> tuple[list[WeightsSet], list[Change]]:
    """List the sets of the lock on both nodes, and what lies there for other locks."""
    with deployed(session, offline=True) as (deployment, _):
        found = deployment.cluster.on_both(lambda node: _sets(deployment, node))
        older = deployment.cluster.on_both(lambda node: prune.plan(node, _wanted(deployment, node)))
    others = [change for role in ROLES for change in older[role] if change.resource.startswith("/")]
    return [row for role in ROLES for row in found[role]], others


def _sets(deployment: Deployment, node: Node) -> list[WeightsSet]:
    facts = weights.gather(node, deployment.lock)
    rows = []
    for manifest in deployment.lock.weights:
        items = [inventory.Item(manifest, file) for file in manifest.files]
        whole = [item for item in items if inventory.only_needs_proof(item, facts)]
        proved = [item for item in whole if is_proved(item.file, facts.of(item))]
        size = sum(item.file.size for item in whole)
        adopted = sum(item.name in node.adopted for item in whole)
        counts = (len(items), len(whole), len(proved), adopted, size, manifest.total_bytes - size)
        rows.append(WeightsSet(node.role, manifest.repository, manifest.commit, *counts))
    return rows


def _wanted(deployment: Deployment, node: Node) -> prune.Wanted:
    """Say what must stay: the recipe's image, and every directory that is kept apart by an id."""
    tag = image.tag_of(deployment.recipe, deployment.lock)
    ids = {"weights.id": deployment.lock.weights_id, "image.id": image_id(tag)}
    values = {"cache": node.cache_dir, **ids}
    sources = [mount.source for mount in deployment.recipe.container.mounts]
    apart = [source for source in sources if source.endswith(tuple(f"/${{{name}}}" for name in ids))]
    derived = [derive.path_on(node, deployment, item).rpartition("/")[0] for item in deployment.recipe.derived]
    folders = frozenset([*(render(source, values) for source in apart), *derived])
    return prune.Wanted(deployment.lock, tag, folders)


def prune_storage(session: Session, confirm: Callable[[Outcome], bool], *, dry_run: bool) -> Outcome:
    """Remove what neither the lock nor a container uses, once `confirm` says yes to the list."""
    with deployed(session, offline=True) as (deployment, _), pair_lock(session.state, session.command):
        begun = time.monotonic()
        found = deployment.cluster.on_both(lambda node: prune.plan(node, _wanted(deployment, node)))
        changes = [*found["head"], *prune.plan_logs(session.state / "runs"), *found["worker"]]
        wanted = Plan(tuple(changes))
        if dry_run or wanted.is_empty or not confirm(Outcome((prune.STEP,), wanted)):
            return Outcome((prune.STEP,), wanted)
        unlock_sudo(session, deployment.cluster, {change.node for change in changes if change.lane == "sudo"})
        report = carry_out(session, deployment, wanted)
        report.raise_failures()
        return Outcome((prune.STEP,), wanted, report, time.monotonic() - begun)
