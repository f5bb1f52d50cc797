"""Weights on both nodes, and differences between locks, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from sparkserve.checks import show_size
from sparkserve.tables import make_table

if TYPE_CHECKING:
    from sparkserve.plan import Change
    from sparkserve.sources import Difference
    from sparkserve.storage import WeightsSet
    from sparkserve.weights import Verification


def verification_view(found: Verification) -> list[Table | str]:
    """Show what is wrong, and how much was proved."""
    good = 2 * found.files - len(found.wrong)
    read = f"{show_size(found.hashed)} read" if found.hashed else "nothing had to be read"
    summary = f"{good} of {2 * found.files} files on both nodes are proved, {read}"
    if found.repaired:
        summary += f"; {len(found.repaired)} files were repaired"
    if not found.findings:
        return [summary]
    rows = ((row.node, row.path, row.problem, row.place) for row in found.findings)
    table = make_table("node", "file", "problem", "place", rows=rows)
    hint = [] if found.holds else ["`sparkserve weights verify --repair` fetches what is wrong"]
    return [table, summary, *hint]


def sets_view(sets: Sequence[WeightsSet], others: Sequence[Change]) -> list[Table | str]:
    """Show each set on each node, then what lies there for other locks."""
    rows = []
    for row in sets:
        missing = show_size(row.missing) if row.missing else ""
        counts = (f"{row.whole} of {row.files}", str(row.proved), str(row.adopted or ""))
        rows.append((row.node, row.source, row.commit[:12], *counts, show_size(row.size), missing))
    columns = ("node", "source", "commit", "files", "proved", "adopted", "size", "missing")
    table = make_table(*columns, rows=rows)
    if not others:
        return [table]
    cells = ((change.node, change.resource, change.before, show_size(change.size)) for change in others)
    rest = make_table("node", "not of this lock", "what it is", "size", rows=cells)
    return [table, rest, "`sparkserve prune` removes what is not of this lock"]


def differences_table(differences: Sequence[Difference]) -> Table | str:
    """Show what another lock would change."""
    if not differences:
        return "the lock is what the sources are today"
    rows = ((row.source, row.before or "absent", row.after or "absent") for row in differences)
    return make_table("source or file", "was", "is", rows=rows)
