"""One start as an attempt: its record, what changed since one worked, and the way back to the pair that answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sparkserve import engine, records
from sparkserve.cluster import Deployment
from sparkserve.engine_watch import Launch
from sparkserve.errors import Failures, SparkserveError, flatten
from sparkserve.parameters import read_secrets
from sparkserve.plan import ApplyReport, Plan
from sparkserve.planning import Starting, secrets_of
from sparkserve.records import Record


@dataclass(frozen=True)
class Attempt:
    """A planned start: for whom, under which command, and who carries a plan out."""

    deployment: Deployment
    start: Starting
    state: Path
    command: str
    carry: Callable[[Plan], ApplyReport]

    @property
    def runs_dir(self) -> Path:
        """Where records and logs of runs are kept."""
        return self.state / "runs"


def make(attempt: Attempt, wanted: Plan) -> ApplyReport:
    """Carry a plan with a start out and keep its record; the pair that it replaced comes back if it does not answer."""
    earlier = records.read_records(attempt.runs_dir)
    launch = attempt.start.launch
    record = records.open_record(attempt.command, attempt.deployment, launch)
    records.save_record(attempt.runs_dir, record)
    try:
        report = attempt.carry(wanted)
    except BaseException as error:
        ending: records.Ending = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        records.close_record(record, ending, launch, str(error) or type(error).__name__)
        records.save_record(attempt.runs_dir, record)
        raise
    failure = "; ".join(str(error) for _, error in report.failed)
    records.close_record(record, "failed" if failure else "answered", launch, failure)
    records.save_record(attempt.runs_dir, record)
    if any(change.step == engine.STEP for change, _ in report.failed):
        _explain(report, record, records.last_answered(earlier))
        _bring_back(attempt, report, records.last_answered(earlier, attempt.start.replaces or "none"))
    return report


def _failure(report: ApplyReport) -> SparkserveError:
    """Give the error of a failed start that is told first."""
    return flatten(next(error for change, error in report.failed if change.step == engine.STEP))[0]


def _explain(report: ApplyReport, record: Record, worked: Record | None) -> None:
    """Tell a failed start what is not as it was when one worked."""
    if worked is None:
        return
    changed = records.changed_since(record, worked) or ["nothing that sparkserve decides"]
    error = _failure(report)
    lines = [f"changed since run {worked.run}, the last that answered:", *(f"  {line}" for line in changed)]
    error.details = "\n".join(filter(None, [error.details, *lines]))


def _bring_back(attempt: Attempt, report: ApplyReport, before: Record | None) -> None:
    """Start the pair that answered before this attempt, exactly as it was recorded; both facts are told."""
    if before is None or not engine.has_removed(report):
        return
    error = _failure(report)
    name = f"the earlier pair ({records.recipe_of(before).name}, run {before.run})"
    try:
        back = attempt.carry(_plan_back(attempt, before))
        back.raise_failures()
    except SparkserveError as failed:
        error.details += f"\n{name} did not come back either: {failed.message}"
        return
    error.details += f"\n{name} was brought back: {back.applied[-1].proof}"


def _plan_back(attempt: Attempt, before: Record) -> Plan:
    secrets = secrets_of(attempt.deployment)
    launch = Launch(
        specs=records.specs_of(before),
        run=before.run,
        endpoint=records.address_of(before, secrets[1]),
        runs_dir=attempt.runs_dir,
        secrets=secrets,
        filling=read_secrets(attempt.deployment.settings),
    )
    deployment = replace(attempt.deployment, recipe=records.recipe_of(before), lock=records.lock_of(before))
    facts, unseen = deployment.cluster.try_both(engine.gather)
    if unseen:
        raise Failures(list(unseen.values()))
    return Plan(tuple(engine.plan(deployment, facts, launch)))
