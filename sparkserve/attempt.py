"""One start as an attempt: its record, what changed since one worked, and the way back to the pair that answered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from sparkserve import engine, records
from sparkserve.cluster import Deployment
from sparkserve.engine_watch import STEP
from sparkserve.errors import SparkserveError, flatten
from sparkserve.plan import ApplyReport, Plan
from sparkserve.planning import Starting, plan_recorded
from sparkserve.records import Record

Carry = Callable[[Plan], ApplyReport]


@contextlib.contextmanager
def recorded(deployment: Deployment, start: Starting, command: str) -> Iterator[None]:
    """Record a start that is refused before its first change; not a watch's, which tries again every ten seconds."""
    try:
        yield
    except SparkserveError as error:
        if command != "watch":
            # Where a pair that runs is only waited for, the record of its run stays that of the start that made it.
            launch = replace(start.launch, run=engine.new_run())
            earlier = records.read_records(launch.runs_dir)
            record = records.open_record(command, deployment, launch)
            records.close_record(record, "failed", launch, "; ".join(map(str, flatten(error))))
            _keep(launch.runs_dir, record)
            _explain(flatten(error)[0], record, records.last_answered(earlier))
        raise


def make(deployment: Deployment, start: Starting, command: str, wanted: Plan, carry: Carry) -> ApplyReport:
    """Carry a plan with a start out and keep its record; the pair that it replaced comes back if it does not answer."""
    launch = start.launch
    earlier = records.read_records(launch.runs_dir)
    record = records.open_record(command, deployment, launch)
    _keep(launch.runs_dir, record)
    try:
        report = carry(wanted)
    except BaseException as error:
        ending: records.Ending = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        records.close_record(record, ending, launch, str(error) or type(error).__name__)
        _keep(launch.runs_dir, record)
        raise
    failure = "; ".join(str(error) for _, error in report.failed)
    records.close_record(record, "failed" if failure else "answered", launch, failure)
    _keep(launch.runs_dir, record)
    if report.failed:
        _explain(_failure(report), record, records.last_answered(earlier))
        before = records.last_answered(earlier, start.replaces or "none")
        # The same pair once more would only fail once more.
        if before and engine.has_removed(report) and not records.is_same_pair(record, before):
            _bring_back(deployment, report, before, launch.runs_dir, carry)
    return report


def _keep(runs_dir: Path, record: Record) -> None:
    """Keep a record where that is possible; a full disk, of which the preflight tells, must not keep a pair down."""
    with contextlib.suppress(OSError):
        records.save_record(runs_dir, record)


def _failure(report: ApplyReport) -> SparkserveError:
    """Give the error of a failed start that is told first."""
    first = min(report.failed, key=lambda failed: failed[0].step != STEP)
    return flatten(first[1])[0]


def _explain(error: SparkserveError, record: Record, worked: Record | None) -> None:
    """Tell a failed start what is not as it was when one worked."""
    if worked is None:
        return
    changed = records.changed_since(record, worked) or ["nothing that sparkserve decides"]
    lines = [f"changed since run {worked.run}, the last that answered:", *(f"  {line}" for line in changed)]
    error.details = "\n".join(filter(None, [error.details, *lines]))


def _bring_back(deployment: Deployment, report: ApplyReport, before: Record, runs_dir: Path, carry: Carry) -> None:
    """Start the pair that answered before this attempt, exactly as it was recorded; both facts are told."""
    pair, error = records.pair_of(before), _failure(report)
    if pair is None:
        return
    name = f"the earlier pair ({pair.recipe.name}, run {before.run})"
    try:
        deployment = replace(deployment, recipe=pair.recipe, lock=pair.lock)
        again = plan_recorded(deployment, pair, before.run, runs_dir)
        back = carry(Plan(tuple(again.changes)))
        back.raise_failures()
    except SparkserveError as failed:
        error.details += f"\n{name} did not come back either: {failed.message}"
        return
    error.details += f"\n{name} was brought back: {back.applied[-1].proof}"
