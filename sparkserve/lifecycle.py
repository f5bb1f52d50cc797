"""The stories: what each command does, from settings to proof; each reads as its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from sparkserve import checks, link, lock, plan, settings, system, tuning
from sparkserve.cluster import Cluster, Deployment, Role, connect, pair_lock, state_dir
from sparkserve.errors import EXIT_NOT_READY, EXIT_USAGE, Failures, SparkserveError
from sparkserve.recipe import Recipe, load_recipe

STEPS = ("download", "sync", "template", "build", "ship", "tune", "start")


class Voice(Protocol):
    """Who hears of a command while it runs."""

    def say(self, text: str) -> None:
        """Tell a person something on the way."""
        ...

    def warn(self, text: str) -> None:
        """Warn."""
        ...

    def reporter(self, plan: plan.Plan) -> AbstractContextManager[plan.Reporter]:
        """Show a plan under way."""
        ...

    def ask_secret(self, question: str) -> str | None:
        """Ask a person for a secret; None where nobody is there."""
        ...


@dataclass
class Session:
    """One command: what was asked for, and who hears of it."""

    command: str
    loaded: settings.Loaded
    recipe: Recipe
    environment: Mapping[str, str]
    voice: Voice

    @property
    def settings(self) -> settings.Settings:
        """The settings."""
        return self.loaded.settings

    @property
    def state(self) -> Path:
        """Our state directory on the head."""
        return state_dir(self.environment)

    @property
    def lock_file(self) -> Path:
        """The lock beside the settings file."""
        return lock.lock_path(self.loaded.env_file)


@dataclass(frozen=True)
class StepRow:
    """What became of one step on one node: the proof, and its time in seconds."""

    step: str
    node: str
    proof: str
    seconds: float
    changed: bool


@dataclass
class Outcome:
    """What a command found, wanted and did."""

    steps: tuple[str, ...]
    plan: plan.Plan
    report: plan.ApplyReport = field(default_factory=plan.ApplyReport)
    seconds: float = 0.0

    @property
    def rows(self) -> list[StepRow]:
        """The summary: one row for each step and node."""
        return [row for step in self.steps for row in summarize(step, self.report.applied)]


def open_session(
    command: str, env_file: Path, environment: Mapping[str, str], flags: Mapping[str, object], voice: Voice
) -> Session:
    """Read settings and recipe, with everything that is wrong in them told at once."""
    loaded = settings.load(env_file, environment, flags)
    return Session(command, loaded, load_recipe(loaded.settings.recipe), environment, voice)


def resolve_lock(session: Session, *, update: bool = False) -> tuple[lock.Lock, bool]:
    """Read the lock, or resolve every source now; tells whether it is new and still has to be written."""
    from sparkserve import sources

    known = None if update else lock.read_lock(session.lock_file, session.recipe, session.settings)
    if known is not None:
        return known, False
    session.voice.say("resolving every source of the recipe")
    return sources.resolve(session.recipe, session.settings, session.voice.say), True


def write_lock(session: Session, *, update: bool) -> lock.Lock:
    """Make sure that the lock is there."""
    found, is_new = resolve_lock(session, update=update)
    if is_new:
        lock.write_lock(session.lock_file, found)
    return found


@contextmanager
def deployed(session: Session) -> Iterator[tuple[Deployment, bool]]:
    """Resolve what is wanted and connect to both nodes; tells whether the lock still has to be written."""
    found, is_new = resolve_lock(session)
    with connect(session.settings) as cluster:
        yield Deployment(session.settings, session.recipe, found, cluster), is_new


def run_steps(session: Session, steps: tuple[str, ...], *, dry_run: bool = False) -> Outcome:
    """Facts, plan, preflight, apply: the line that every writing command is a part of."""
    begun = time.monotonic()
    with deployed(session) as (deployment, lock_is_new):
        if dry_run:
            return Outcome(steps, _plan_steps(session, deployment, steps))
        with pair_lock(session.state, session.command):
            if lock_is_new:
                lock.write_lock(session.lock_file, deployment.lock)
            wanted = _plan_steps(session, deployment, steps)
            if wanted.is_empty:
                return Outcome(steps, wanted, seconds=time.monotonic() - begun)
            with session.voice.reporter(wanted) as reporter:
                report = plan.apply(wanted, reporter)
        outcome = Outcome(steps, wanted, report, time.monotonic() - begun)
        report.raise_failures()
        return outcome


def _plan_steps(session: Session, deployment: Deployment, steps: tuple[str, ...]) -> plan.Plan:
    cluster = deployment.cluster
    facts = cluster.on_both(system.gather)
    checks.raise_failures(checks.check_basics(session.recipe, facts))
    every = plan_everything(session, deployment, steps)
    chosen, pending = plan.select(every, steps)
    if pending:
        raise _not_prepared(pending)
    preflight(session, deployment, facts, chosen)
    return chosen


def _not_prepared(pending: list[plan.Change]) -> SparkserveError:
    rows = [f"{change.node}: {change.step} {change.resource}: {change.before}" for change in pending]
    details = "\n".join(rows[:10] + ([f"and {len(rows) - 10} more"] if len(rows) > 10 else []))
    message = f"{len(pending)} earlier changes are still to be made"
    return SparkserveError("not_prepared", message, "sparkserve up", details=details, exit_code=EXIT_NOT_READY)


def summarize(step: str, applied: list[plan.Applied]) -> list[StepRow]:
    """Sum up what was applied of one step, by node."""
    rows = []
    for node in ("head", "worker"):
        done = [item for item in applied if item.change.step == step and item.change.node == node]
        if not done:
            continue
        size = sum(item.change.size for item in done)
        proof = done[-1].proof
        if len(done) > 1 and size:
            proof = f"{len(done)} files, {checks.show_size(size)}: size and hash right"
        seconds = max(item.ended for item in done) - min(item.begun for item in done)
        rows.append(StepRow(step, node, proof, seconds, changed=True))
    return rows or [StepRow(step, "both", "as wanted already", 0.0, changed=False)]
