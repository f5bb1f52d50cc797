"""The stories of what lies on both nodes' disks: prove the weights, list them, remove what is not needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from sparkserve import derive, image_facts, inventory, lock, prune, weights
from sparkserve.checks import show_size
from sparkserve.cluster import ROLES, Cluster, Deployment, Node, Role, pair_lock
from sparkserve.container import image_id
from sparkserve.errors import Failures, SparkserveError, usage_error
from sparkserve.lifecycle import Outcome, Session, carry_out, deployed, find_recipe, run_steps, unlock_sudo
from sparkserve.manifest import is_proved
from sparkserve.placeholders import render
from sparkserve.plan import Change, Plan
from sparkserve.recipe import Recipe
from sparkserve.records import read_records
from sparkserve.settings import load

_REPAIR = ("download", "sync")


def verify_weights(session: Session, *, full: bool, repair: bool) -> weights.Verification:
    """Prove the weights of both nodes without the network; `repair` then fetches what is wrong, and looks again."""
    with deployed(session, offline=True) as (deployment, _):
        act = partial(carry_out, session, deployment)
        found = weights.verify(deployment, act, full=full)
        if found.holds or not repair:
            return found
        session.voice.say(f"repairing {len(found.wrong)} files")
        run_steps(session, _REPAIR, opened=deployment)
        again = weights.verify(deployment, act, full=False)
    return weights.Verification(again.findings, again.files, found.hashed, found.wrong)


def plan_repair(session: Session) -> Outcome:
    """Plan what a repair would read and fetch by what is known of the files; none is read."""
    with deployed(session, offline=True) as (deployment, _):
        return run_steps(session, _REPAIR, dry_run=True, opened=deployment)


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
        needed = _with_others(session, deployment)
        older = deployment.cluster.on_both(lambda node: prune.plan(node, _wanted(needed, node)))
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


def _with_others(session: Session, deployment: Deployment) -> list[Deployment]:
    """Give what is wanted, and what each other lock beside it wants: `start --recipe OTHER` left those."""
    others = lock.read_others(session.lock_file)
    return [deployment, *(replace(deployment, recipe=_recipe_of(session, one), lock=one) for one in others)]


def _recipe_of(session: Session, other: lock.Lock) -> Recipe:
    """Find the recipe of a lock, by its name or as it was named when it was started."""
    settled = load(session.loaded.env_file, session.environment, {}).settings.recipe
    records = read_records(session.state / "runs")
    for named in dict.fromkeys([settled, *(record.recipe for record in records), other.recipe]):
        with contextlib.suppress(SparkserveError):
            recipe = find_recipe(named, session.environment)
            if recipe.name == other.recipe:
                return recipe
    message = f"a lock beside {session.lock_file} is of recipe {other.recipe}, which is not found: what is it for?"
    hint = "remove that lock if you gave its recipe up; else start it once more by its path, then prune"
    raise usage_error("prune_recipe", message, hint)


def _wanted(deployments: list[Deployment], node: Node) -> prune.Wanted:
    """Say what must stay: the recipes' images, and every directory that is kept apart by an id."""
    images: set[str] = set()
    folders: set[str] = set()
    for one in deployments:
        tag = image_facts.tag_of(one.recipe, one.lock)
        ids = {"weights.id": one.lock.weights_id, "image.id": image_id(tag)}
        values = {"cache": node.cache_dir, **ids}
        sources = [mount.source for mount in one.recipe.container.mounts]
        apart = [source for source in sources if source.endswith(tuple(f"/${{{name}}}" for name in ids))]
        derived = [derive.path_on(node, one, item).rpartition("/")[0] for item in one.recipe.derived]
        images.add(tag)
        folders.update(render(source, values) for source in apart)
        folders.update(derived)
    return prune.Wanted(tuple(one.lock for one in deployments), frozenset(images), frozenset(folders))


def prune_storage(
    session: Session, confirm: Callable[[Outcome], bool], *, dry_run: bool, build_cache: bool = False
) -> Outcome:
    """Remove what neither a lock nor a container uses, once `confirm` says yes to the list."""
    held = contextlib.nullcontext() if dry_run else pair_lock(session.state, session.command)
    with deployed(session, offline=True) as (deployment, _), held:
        begun = time.monotonic()
        needed = _with_others(session, deployment)
        found = deployment.cluster.on_both(lambda node: prune.plan(node, _wanted(needed, node)))
        builds = _plan_build_caches(session, deployment.cluster, wanted=build_cache)
        changes = [*found["head"], *prune.plan_logs(session.state / "runs"), *found["worker"], *builds]
        wanted = Plan(tuple(changes))
        if dry_run or wanted.is_empty or not confirm(Outcome((prune.STEP,), wanted)):
            return Outcome((prune.STEP,), wanted)
        rooted = [change for change in changes if change.lane == "sudo"]
        removals = [prune.removal(change.resource) for change in rooted]
        unlock_sudo(session, deployment.cluster, {change.node for change in rooted}, removals)
        report = carry_out(session, deployment, wanted)
        report.raise_failures()
        return Outcome((prune.STEP,), wanted, report, time.monotonic() - begun)


def _plan_build_caches(session: Session, cluster: Cluster, *, wanted: bool) -> list[Change]:
    """Plan the end of both nodes' build caches where that is asked for by name; else only tell of them."""
    found, errors = cluster.try_both(prune.plan_build_cache)
    if wanted and errors:
        raise Failures(list(errors.values()))
    changes = [change for role in found for change in found[role]]
    for change in [] if wanted else changes:
        size = show_size(change.size)
        session.voice.say(f"{change.node}: Docker's build cache holds {size}, of anybody's builds; see --build-cache")
    return changes if wanted else []
