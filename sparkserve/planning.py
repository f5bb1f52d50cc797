"""From facts of both nodes to one plan of the whole line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from sparkserve import adoption, chat_template, derive, engine, image, link, tuning, weights
from sparkserve.blueprint import build_specs
from sparkserve.cluster import Deployment, Node, Role
from sparkserve.container import check_resolved, with_secrets
from sparkserve.endpoint import Endpoint, open_endpoint
from sparkserve.engine_watch import Launch
from sparkserve.errors import EXIT_COULD_NOT_LOOK, Failures, SparkserveError
from sparkserve.parameters import read_api_key, read_secrets, secrets_to_mask
from sparkserve.placeholders import PLACEHOLDER, render
from sparkserve.plan import Change
from sparkserve.records import Pair
from sparkserve.status_look import Question, look

Links = dict[Role, link.LinkFacts]


def plan_preparation(deployment: Deployment) -> list[Change]:
    """Plan everything before the start; the rooms look at both nodes side by side."""
    both = deployment.cluster.on_both
    found = both(lambda node: weights.gather(node, deployment.lock))
    return [
        *weights.plan(deployment, found),
        *derive.plan(deployment, both(lambda node: derive.gather(node, deployment))),
        *chat_template.plan(deployment, both(lambda node: chat_template.gather(node, deployment))),
        *image.plan(deployment, both(lambda node: image.gather(node, deployment))),
        *plan_tuning(deployment),
    ]


def look_for_weights(
    deployment: Deployment, words: Collection[str], warn: Callable[[str], None], *, only_assume: bool = False
) -> list[Change]:
    """Plan the proof of weights that are found in folders; or only assume, for this run, that they are right."""
    if not words:
        return []
    found = adoption.find(deployment, adoption.parse_folders(words, Path.cwd()))
    facts = deployment.cluster.on_both(lambda node: weights.gather(node, deployment.lock))
    for role, search in found.items():
        for problem in search.problems:
            warn(f"{role}: cannot look into {problem}")
    changes = adoption.plan(deployment, facts, found)
    if not changes:
        warn(f"nothing in {', '.join(words)} has the name and size of a file that is still wanted")
    if only_assume:
        adoption.assume(deployment, facts, found)
    return changes


def tidy_weights(deployment: Deployment, steps: Collection[str]) -> None:
    """Leave no empty directories of partials where weights were written, by this run or by one that was killed."""
    if not {"download", "sync"}.isdisjoint(steps):
        deployment.cluster.on_both(lambda node: weights.tidy(node, deployment.lock))


def plan_tuning(deployment: Deployment) -> list[Change]:
    """Plan the host memory settings."""
    sysctls = deployment.recipe.tuning.sysctl
    return tuning.plan(deployment, deployment.cluster.on_both(lambda node: tuning.gather(node, sysctls)))


@dataclass(frozen=True)
class Starting:
    """A planned start: its changes, the cable as it was seen, and the run that it replaces (empty where none runs).

    `refusals` keep it from being made; the preflight tells them beside all else that does.
    """

    changes: list[Change]
    links: Links
    launch: Launch
    replaces: str = ""
    refusals: tuple[SparkserveError, ...] = ()


def plan_start(
    deployment: Deployment,
    runs_dir: Path,
    earlier: Iterable[Change],
    skipped_checks: tuple[str, ...] = (),
    *,
    dry_run: bool = False,
) -> Starting:
    """Plan the start of both ranks, which needs every earlier change."""
    links = deployment.cluster.on_both(link.gather)
    specs = build_specs(deployment, links)
    endpoint = open_endpoint(deployment.settings, deployment.recipe)
    digests = {role: spec.digest for role, spec in specs.items()}
    state = runs_dir.parent
    status = look(Question(deployment.cluster, deployment.recipe, endpoint, state, digests, remembers=not dry_run))
    if status.unseen:
        raise Failures(list(status.unseen.values()))
    launch = Launch(
        specs=specs,
        run=engine.new_run(),
        endpoint=endpoint,
        runs_dir=runs_dir,
        first_start=not all(deployment.cluster.on_both(lambda node: is_warm(deployment, node)).values()),
        seen=status.verdict.state,
        needs=tuple(change.key for change in earlier),
        secrets=secrets_to_mask(deployment.settings),
        kernels={role: facts.kernel for role, facts in status.facts.items()},
        skipped_checks=skipped_checks,
    )
    changes = engine.plan(deployment, status.facts, launch)
    if not changes and status.verdict.state == "unknown":
        message = f"the pair runs as wanted, but whether it answers cannot be seen: {'; '.join(status.verdict.reasons)}"
        raise SparkserveError("answers_unseen", message, "sparkserve status", exit_code=EXIT_COULD_NOT_LOOK)
    for spec in launch.specs.values() if changes else ():
        check_resolved(spec)
        with_secrets(spec, read_secrets(deployment.settings))
    runs = {one.run for facts in status.facts.values() for one in facts.containers if one.is_running}
    running = runs.pop() if len(runs) == 1 else ""
    if all(change.resource == "ready" for change in changes):
        launch = replace(launch, run=running)
    return Starting(changes, links, launch, running, engine.foreign_refusals(status.facts))


def plan_recorded(
    deployment: Deployment, pair: Pair, run: str, runs_dir: Path, skipped_checks: tuple[str, ...] = ()
) -> Starting:
    """Plan the start of a pair exactly as it was recorded, whatever runs now."""
    settings = deployment.settings
    launch = Launch(
        specs=pair.specs,
        run=run,
        endpoint=Endpoint(pair.base_url, pair.model, read_api_key(settings)),
        runs_dir=runs_dir,
        seen="degraded",
        secrets=secrets_to_mask(settings),
        skipped_checks=skipped_checks,
    )
    links = deployment.cluster.on_both(link.gather)
    facts = deployment.cluster.on_both(engine.gather)
    return Starting(engine.plan(deployment, facts, launch), links, launch, refusals=engine.foreign_refusals(facts))


def is_warm(deployment: Deployment, node: Node) -> bool:
    """Whether a finished first start left its files on a node, so that the next one is quick and writes nothing."""
    pattern = deployment.recipe.readiness.warm_files
    if not pattern:
        return False
    values = {"cache": node.cache_dir, "weights.id": deployment.lock.weights_id, "rank": str(node.rank)}
    pattern = render(pattern, values)
    return bool(node.session.ask("facts", exist=[pattern])["exist"][pattern]) and not PLACEHOLDER.search(pattern)
