"""The stories: what each command does, from settings to proof; each reads as its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from sparkserve import (
    adoption,
    attempt,
    blueprint,
    check_catalog,
    checks,
    engine,
    image,
    link,
    lock,
    planning,
    preflight,
    recipe_git,
    records,
    sources,
    status_look,
    tuning,
)
from sparkserve.cluster import ROLES, Cluster, Deployment, Node, connect, pair_lock, require_worker
from sparkserve.endpoint import open_endpoint
from sparkserve.engine_stop import abandon
from sparkserve.engine_watch import is_half_started
from sparkserve.errors import EXIT_NOT_READY, EXIT_USAGE, Failures, SparkserveError, flatten, usage_error
from sparkserve.parameters import decide_parameters, read_sudo_password, secrets_to_mask
from sparkserve.plan import ApplyReport, Change, Interrupted, Plan, apply, select
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Loaded, Settings, load, state_dir
from sparkserve.summary import StepRow, summarize
from sparkserve.verify import Exam, Proof, verify

if TYPE_CHECKING:
    from sparkserve.output import Output

STEPS = ("download", "sync", "derive", "template", "build", "ship", "tune", "start")


@dataclass
class Session:
    """One command: what was asked for, who hears of it, and whether what it does is still wanted."""

    command: str
    loaded: Loaded
    recipe: Recipe
    environment: Mapping[str, str]
    voice: Output
    skip_checks: tuple[str, ...] = ()
    build_options: tuple[str, ...] = ()
    is_wanted: Callable[[], bool] = lambda: True

    @property
    def settings(self) -> Settings:
        """The settings."""
        return self.loaded.settings

    @property
    def state(self) -> Path:
        """Our state directory on the head."""
        return state_dir(self.environment)

    @property
    def lock_file(self) -> Path:
        """The lock beside the settings file; a recipe named for one run has its own where that is another's."""
        main = lock.lock_path(self.loaded.env_file)
        if self.loaded.sources["recipe"] == "flag" and lock.recipe_of(main) not in ("", self.recipe.name):
            return main.with_name(f"sparkserve.{self.recipe.name}.lock.json")
        return main

    @property
    def facts_file(self) -> Path:
        """What was last seen of both nodes."""
        return self.state / "facts.json"


@dataclass
class Outcome:
    """What a command found, wanted and did."""

    steps: tuple[str, ...]
    plan: Plan
    report: ApplyReport = field(default_factory=ApplyReport)
    seconds: float = 0.0

    @property
    def rows(self) -> list[StepRow]:
        """The summary: one row for each step and node."""
        return [row for step in self.steps for row in summarize(step, self.report)]


def open_session(
    command: str, env_file: Path, environment: Mapping[str, str], flags: Mapping[str, Any], voice: Output
) -> Session:
    """Read settings and recipe, with everything that is wrong in them told at once."""
    skipped = tuple(name for name in flags.get("skip_check") or () if check_catalog.find_entry(name))
    loaded = load(env_file, environment, flags)
    recipe = find_recipe(loaded.settings.recipe, environment)
    return Session(command, loaded, recipe, environment, voice, skipped, flags.get("build_options", ()))


def find_recipe(name: str, environment: Mapping[str, str]) -> Recipe:
    """Read a recipe by its name, path or trusted git address."""
    if name.startswith(recipe_git.PREFIX):
        return recipe_git.load_trusted(name, state_dir(environment))
    return load_recipe(name)


def resolve_lock(session: Session, *, update: bool = False) -> tuple[lock.Lock, bool]:
    """Read the lock, or resolve every source now; tells whether it is new and still has to be written."""
    known = None if update else lock.read_lock(session.lock_file, session.recipe, session.settings)
    if known is not None:
        return known, False
    session.voice.say("resolving every source of the recipe")
    return sources.resolve(session.recipe, session.settings, session.voice.say), True


@dataclass(frozen=True)
class Locked:
    """A lock, its sources, its place, whether this run wrote it, and how it differs from the one that was there."""

    lock: lock.Lock
    rows: list[sources.SourceRow]
    path: Path
    written: bool
    differences: list[sources.Difference] = field(default_factory=list)


def lock_sources(session: Session, *, update: bool, dry_run: bool) -> Locked:
    """Make sure that every source is resolved; writes the lock and nothing else."""
    found, is_new = resolve_lock(session, update=update)
    before = lock.peek(session.lock_file) or lock.peek(session.recipe.directories[0] / lock.NAME)
    differences = sources.compare(before, found, session.recipe, session.settings) if is_new else []
    if is_new and not dry_run:
        with pair_lock(session.state, session.command):
            lock.write_lock(session.lock_file, found)
    rows = sources.describe(found, session.recipe, session.settings)
    return Locked(found, rows, session.lock_file, is_new and not dry_run, differences)


def require_lock(session: Session) -> lock.Lock:
    """Give the lock that is there; nothing is resolved."""
    found = lock.read_lock(session.lock_file, session.recipe, session.settings)
    if found is None:
        raise usage_error("lock_missing", f"there is no {session.lock_file}", "sparkserve lock")
    return found


@contextmanager
def deployed(session: Session, *, offline: bool = False) -> Iterator[tuple[Deployment, bool]]:
    """Resolve what is wanted and connect to both nodes; tells whether the lock still has to be written."""
    require_worker(session.settings)
    decide_parameters(session.settings, session.recipe)  # or both nodes would tell the same of them
    if offline:
        require_lock(session)
    found, is_new = resolve_lock(session)
    with connect(session.settings) as cluster:
        yield Deployment(session.settings, session.recipe, found, cluster, session.build_options), is_new


def run_steps(
    session: Session,
    steps: tuple[str, ...],
    *,
    dry_run: bool = False,
    adopt: Collection[str] = (),
    opened: Deployment | None = None,
) -> Outcome:
    """Facts, plan, preflight, apply: the line that every writing command is a part of, also over an open connection."""
    begun = time.monotonic()
    with nullcontext((opened, False)) if opened else deployed(session) as (deployment, lock_is_new):
        if dry_run:
            planning.look_for_weights(deployment, adopt, session.voice.warn, only_assume=True)
            return Outcome(steps, plan_steps(session, deployment, steps, dry_run=True)[0])
        with pair_lock(session.state, session.command):
            if lock_is_new:
                lock.write_lock(session.lock_file, deployment.lock)
            lent = Plan(tuple(planning.look_for_weights(deployment, adopt, session.voice.warn)))
            adopted = carry_out(session, deployment, lent)
            adoption.tell_rest(adopted, session.voice.warn)
            wanted, start = plan_steps(session, deployment, steps)
            if start is not None and (start.changes or start.refusals):
                report = _start(session, deployment, wanted, start)
            else:
                if not wanted.is_empty:
                    prepare(session, deployment, wanted, start)
                report = carry_out(session, deployment, wanted)
            planning.tidy_weights(deployment, steps)
        report.applied[:0], report.left_alone = adopted.applied, adopted.left_alone
        every = Plan((*lent.changes, *wanted.changes))
        outcome = Outcome(("adopt", *steps) if adopt else steps, every, report, time.monotonic() - begun)
        report.raise_failures()
        if start is not None and session.command != "watch":  # a restart of its own is no word of the owner's
            note_down(
                session, partial(records.keep_wanted, session.state, serving=True, recipe=session.settings.recipe)
            )
        return outcome


def restart(session: Session, last: records.Pair | None) -> Outcome:
    """Start what is wanted; where that is not ready to be started since its lock or its settings changed, the last."""
    try:
        return run_steps(session, ("start",))
    except SparkserveError as error:
        has_changed = error.exit_code == EXIT_USAGE
        if last is not None and error.code == "not_prepared":
            has_changed = lock.read_lock(session.lock_file, session.recipe, session.settings) != last.lock
        if last is None or not has_changed:
            raise
        session.voice.warn(f"{'; '.join(map(str, flatten(error)))}; until then it is the last pair that answered")
    with connect(session.settings) as cluster, pair_lock(session.state, session.command):
        deployment = Deployment(session.settings, last.recipe, last.lock, cluster)
        runs_dir, run = session.state / "runs", engine.new_run()
        start = planning.plan_recorded(deployment, last, run, runs_dir, session.skip_checks)
        wanted = Plan(tuple(start.changes))
        report = _start(session, deployment, wanted, start)
        report.raise_failures()
        return Outcome(("start",), wanted, report)


def _start(session: Session, deployment: Deployment, wanted: Plan, start: planning.Starting) -> ApplyReport:
    """Carry a plan with a start out, on record also where it is refused."""
    with attempt.recorded(deployment, start, session.command):
        prepare(session, deployment, wanted, start)
    return attempt.make(deployment, start, session.command, wanted, partial(carry_out, session, deployment))


def note_down(session: Session, note: Callable[[], object]) -> None:
    """Write something down where that is possible; a head whose disk takes nothing must still start and stop."""
    try:
        note()
    except OSError as error:
        session.voice.warn(f"the head's state cannot be written ({error}); going on all the same")


def carry_out(session: Session, deployment: Deployment, wanted: Plan) -> ApplyReport:
    """Carry a plan out; an interrupt between the first rank and the answer must not leave one rank alone."""
    try:
        with session.voice.reporter(wanted) as reporter:
            return apply(wanted, reporter, is_wanted=session.is_wanted)
    except Interrupted as interrupted:
        if is_half_started(interrupted.report):
            for problem in abandon(deployment.cluster, session.state / "runs", secrets_to_mask(session.settings)):
                session.voice.warn(f"not cleaned up: {problem}; `sparkserve stop` tries again")
        raise


def plan_steps(
    session: Session, deployment: Deployment, steps: tuple[str, ...], *, dry_run: bool = False
) -> tuple[Plan, planning.Starting | None]:
    """Plan the wanted steps; an earlier step that is still to be made, and not wanted now, refuses them."""
    if set(steps) == {"tune"}:
        return Plan(tuple(planning.plan_tuning(deployment))), None
    every = planning.plan_preparation(deployment)
    start = None
    if "start" in steps:
        left_out = [change for change in every if change.step == "tune" and "tune" not in steps]
        every = [change for change in every if change not in left_out]
        for change in left_out:
            session.voice.warn(f"{change.node} is not tuned ({change.before}); `sparkserve tune` sets {change.after}")
        for text in session.recipe.warnings:
            session.voice.warn(text)
        runs = session.state / "runs"
        start = planning.plan_start(deployment, runs, every, session.skip_checks, dry_run=dry_run)
        if not dry_run:
            seen = blueprint.see(deployment.cluster, start.links)
            note_down(session, lambda: blueprint.save_facts(session.facts_file, seen))
        every += start.changes
    asked = (image.FLAGS_STEP,) if {"build", "start"} & {*steps} else ()
    chosen, pending = select(every, (*steps, *asked))
    refusals = (*(start.refusals if start else ()), *([_not_prepared(pending)] if pending else []))
    if refusals and (start is None or dry_run):
        raise Failures([*refusals])
    return chosen, start and replace(start, refusals=refusals)


def prepare(session: Session, deployment: Deployment, wanted: Plan, start: planning.Starting | None) -> None:
    """Hold the preflight: everything that would stop the plan half-way is told before its first change."""
    roles = {change.node for change in wanted.changes if change.lane == "sudo"}
    unlock_sudo(session, deployment.cluster, roles, tuning.root_commands(deployment.recipe.tuning.sysctl))
    found = preflight.preflight(deployment, wanted, start)
    for check in found:
        is_skipped = check.id in session.skip_checks
        if check.verdict != "ok" and (is_skipped or check.verdict != "fail"):
            named = f"check {check.id}{' (skipped)' * is_skipped}, {check.node or 'both nodes'}"
            advice = f"; {check.advice}" if check.advice else ""
            session.voice.warn(f"{named}: {check.observed}; better: {check.needed}{advice}")
    refusals = start.refusals if start else ()
    checks.raise_failures((check for check in found if check.id not in session.skip_checks), refusals)


def unlock_sudo(session: Session, cluster: Cluster, roles: Collection[str], commands: list[list[str]]) -> None:
    """Give the nodes that will need root for `commands` their sudo password, and try it before anything is changed."""
    for node in cluster.nodes:
        node.host.sudo_password = _password_of(session, node, commands) if node.role in roles else None
    cluster.on_both(lambda node: node.host.check_sudo_password())


def give_sudo_password(session: Session, node: Node, command: list[str]) -> None:
    """Give one node its sudo password where such a command needs it, and try it."""
    node.host.sudo_password = _password_of(session, node, [command])
    node.host.check_sudo_password()


def _password_of(session: Session, node: Node, commands: list[list[str]]) -> SecretStr | None:
    """Find the sudo password of a node: none where sudo asks for none, else from the settings or from a person."""
    if not node.host.asks_sudo_password(commands):
        return None
    if (known := read_sudo_password(session.settings)) is not None:
        return known
    answer = session.voice.ask_secret(f"sudo password of {node.identity['user']} on the {node.role}")
    return SecretStr(answer) if answer else None


def _not_prepared(pending: list[Change]) -> SparkserveError:
    rows = [f"{change.node}: {change.step} {change.resource}: {change.before}" for change in pending]
    details = "\n".join(rows[:10] + ([f"and {len(rows) - 10} more"] if len(rows) > 10 else []))
    message = f"{len(pending)} earlier changes are still to be made"
    return SparkserveError("not_prepared", message, "sparkserve up", details=details, exit_code=EXIT_NOT_READY)


def undo_tuning(session: Session, *, dry_run: bool) -> dict[str, str]:
    """Put back what the journal of each node kept."""
    with connect(session.settings) as cluster:
        if dry_run:
            return {str(role): text for role, text in cluster.on_both(tuning.kept_values).items()}
        with pair_lock(session.state, session.command):
            unlock_sudo(session, cluster, ROLES, tuning.root_commands(session.recipe.tuning.sysctl))
            return tuning.undo(cluster)


def up(session: Session, *, skip: tuple[str, ...], dry_run: bool) -> tuple[Outcome, list[Proof]]:
    """Do every step that is still to be done, then prove the endpoint by real requests."""
    unknown = set(skip) - {"tune"}
    if unknown:
        message = f"--skip {', '.join(sorted(unknown))}: only tune can be left out"
        raise usage_error("skip_unknown", message, "sparkserve up --skip tune")
    outcome = run_steps(session, tuple(step for step in STEPS if step not in skip), dry_run=dry_run)
    return outcome, [] if dry_run else verify_endpoint(session)


def draw(session: Session, facts: Path | None, *, live: bool) -> blueprint.Blueprint:
    """Give the containers of both ranks as a start would make them; asks the nodes only where `live` says so."""
    settings, recipe = session.settings, session.recipe
    known = lock.read_lock(session.lock_file, recipe, settings)
    if live:
        with connect(settings) as cluster:
            seen = blueprint.see(cluster, cluster.on_both(link.gather))
        note_down(session, lambda: blueprint.save_facts(session.facts_file, seen))
        return blueprint.draw(settings, recipe, known, seen, "both nodes, seen now")
    place = facts or session.facts_file
    if facts is None and not place.exists():
        return blueprint.draw(settings, recipe, known, None, "no facts: the nodes were not seen yet")
    return blueprint.draw(settings, recipe, known, blueprint.load_facts(place), f"facts of {place}")


def verify_endpoint(session: Session) -> list[Proof]:
    """Ask the endpoint the recipe's requests."""
    context = decide_parameters(session.settings, session.recipe).context
    endpoint, recipe = open_endpoint(session.settings, session.recipe), session.recipe
    is_busy = partial(status_look.is_busy, endpoint, recipe.counters)
    exam = Exam(endpoint, recipe.verification, context, is_busy=is_busy)
    return verify(exam, lambda name: session.voice.say(f"asking the endpoint: {name}"))
