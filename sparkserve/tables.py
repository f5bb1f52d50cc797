"""Results as tables for people and rows for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr
from rich.table import Table
from rich.text import Text

from sparkserve.checks import show_size
from sparkserve.parameters import find_defaults
from sparkserve.progress import duration
from sparkserve.settings import Loaded, Settings, variable_name

if TYPE_CHECKING:
    from sparkserve.lifecycle import Locked, Outcome
    from sparkserve.plan import ApplyReport, Change
    from sparkserve.recipe import Recipe

STYLES = {
    "ok": "green",
    "fail": "red",
    "warn": "yellow",
    "unseen": "magenta",
}
WORDS = {"unseen": "could not look"}


def make_table(*columns: str, rows: Iterable[Iterable[Text | str]], caption: str = "") -> Table:
    """Make a table as all of ours look; a text is shown as it is, whatever brackets it has."""
    table = Table(box=None, pad_edge=False, header_style="bold", caption=caption or None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def verdict_text(verdict: str) -> Text:
    """Show a verdict in its words and its colour."""
    return Text(WORDS.get(verdict, verdict), STYLES.get(verdict, ""))


def config_rows(loaded: Loaded, recipe: Recipe | None) -> list[dict[str, Any]]:
    """List every setting with value and source; a secret shows only that it is set."""
    rows = []
    defaults = find_defaults(recipe) if recipe else {}
    for name, field in Settings.model_fields.items():
        value, source = getattr(loaded.settings, name), loaded.sources[name]
        if source == "default" and defaults.get(name) not in (None, ""):
            value, source = defaults[name], "recipe"
        shown = "***" if isinstance(value, SecretStr) else None if value in (None, "", ()) else str(value)
        rows.append({"name": variable_name(name), "value": shown, "source": source, "description": field.description})
    return rows


def config_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Show the settings."""
    cells = ((row["name"], row["value"] or "-", row["source"], row["description"]) for row in rows)
    return make_table("setting", "value", "from", "what it is", rows=cells)


def lock_table(found: Locked) -> Table:
    """Show what each source resolved to."""
    rows = (
        (row.source, row.asked, row.resolved, str(row.files or ""), show_size(row.size) if row.size else "")
        for row in found.rows
    )
    caption = f"written to {found.path}" if found.written else "nothing was written"
    return make_table("source", "asked for", "resolved to", "files", "size", rows=rows, caption=caption)


def outcome_data(outcome: Outcome) -> dict[str, Any]:
    """Give a plan and what was done of it as plain data."""
    names = ("node", "step", "resource", "before", "after", "size", "needs")
    return {
        "changes": [{name: getattr(change, name) for name in names} for change in outcome.plan.changes],
        **report_data(outcome.report),
        "seconds": round(outcome.seconds, 3),
    }


def report_data(report: ApplyReport) -> dict[str, Any]:
    """Give what was done of a plan as plain data, also where it failed or was interrupted."""
    return {
        "applied": [
            {"key": item.change.key, "proof": item.proof, "seconds": round(item.ended - item.begun, 3)}
            for item in report.applied
        ],
        "failed": [change.key for change, _ in report.failed],
        "not_reached": [change.key for change in report.not_reached],
        "left_alone": [{"key": change.key, "why": why} for change, why in report.left_alone],
    }


def outcome_view(outcome: Outcome, *, preview: bool) -> Table | str:
    """Show the plan before, or the summary after."""
    if outcome.plan.is_empty:
        return "No changes"
    return plan_table(outcome) if preview else summary_table(outcome)


def _alike(changes: Sequence[Change]) -> list[list[Change]]:
    """Put the files of one step that miss the same thing into one row; everything else has its own."""
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        own = "" if change.step in ("download", "sync") else change.resource
        groups.setdefault((change.step, change.node, change.before, own), []).append(change)
    return list(groups.values())


def plan_table(outcome: Outcome) -> Table:
    """Show what would change."""
    rows = []
    for same in _alike(outcome.plan.changes):
        first, size = same[0], sum(change.size for change in same)
        what = first.resource if len(same) == 1 else f"{len(same)} files"
        after = first.after if len(same) == 1 else "size and hash of the lock"
        rows.append((first.step, first.node, what, first.before, after, show_size(size) if size else ""))
    total = sum(change.size for change in outcome.plan.changes)
    caption = f"{_changes(len(outcome.plan.changes))}, {show_size(total)}; nothing was touched"
    return make_table("step", "node", "what", "is", "will be", "size", rows=rows, caption=caption)


def _changes(number: int) -> str:
    return f"{number} change{'s' * (number != 1)}"


def summary_table(outcome: Outcome) -> Table:
    """Show what each step did, where, how it was proved, and how long it took."""
    rows = ((row.step, row.node, row.proof, f"{row.seconds:.1f} s" if row.seconds else "") for row in outcome.rows)
    caption = f"{_changes(len(outcome.report.applied))} in {duration(outcome.seconds)}"
    return make_table("step", "node", "proof", "time", rows=rows, caption=caption)


def value_table(rows: Mapping[str, str], name: str = "setting", value: str = "value", *, caption: str = "") -> Table:
    """Show one value for each name."""
    return make_table(name, value, rows=rows.items(), caption=caption)


def proofs_table(proofs: Sequence[Any]) -> Table:
    """Show what was asked of the endpoint and what it answered."""
    rows = (
        (proof.name, verdict_text(proof.verdict), proof.observed, proof.needed, f"{proof.seconds:.1f} s")
        for proof in proofs
    )
    return make_table("proof", "verdict", "observed", "needed", "time", rows=rows)
