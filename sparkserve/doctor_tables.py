"""A check-up as tables: both nodes side by side, what is not in order first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sparkserve.checks import Check, Verdict
from sparkserve.tables import STYLES, make_table

if TYPE_CHECKING:
    from sparkserve.doctor import Report

_ORDER: tuple[Verdict, ...] = ("fail", "unseen", "warn", "ok")
_WORDS = {"unseen": "could not look"}


def report_data(report: Report) -> dict[str, Any]:
    """Give a check-up as plain data."""
    checks = [{**vars(check), "hint": "" if check.verdict == "ok" else check.advice} for check in report.checks]
    return {
        "verdict": summary(report),
        "checks": checks,
        "differences": [one for one in report.differences if not one.same],
        "recorded": report.recorded,
        "seconds": round(report.seconds, 3),
    }


def report_view(report: Report, *, shows_all: bool = False) -> Iterator[Table | str]:
    """Show a check-up: what is not in order (or all), what puts it right, what differs, and the verdict."""
    table = _checks_table(report.checks, shows_all=shows_all)
    if table.row_count:
        yield from (table, "")
    advised: dict[tuple[str, str], list[str]] = {}
    for check in sorted(report.checks, key=lambda check: _ORDER.index(check.verdict)):
        if check.verdict != "ok" and check.advice:
            advised.setdefault((check.id, check.advice), []).append(check.node)
    for (name, advice), nodes in advised.items():
        where = f" ({', '.join(nodes)})" if any(nodes) else ""
        yield f"{name}{where}: {advice}"
    different = [one for one in report.differences if not one.same]
    if different:
        rows = ((one.what, one.head or "-", one.worker or "-") for one in different)
        yield from ("", make_table("differs", "head", "worker", rows=rows))
    if report.recorded:
        yield f"recorded in {report.recorded}"
    yield f"{summary(report)}, in {report.seconds:.1f} s"


def short_view(report: Report) -> Iterator[str]:
    """Show only what is not in order or could not be looked at, then the verdict."""
    for check in report.checks:
        if check.verdict in ("warn", "fail", "unseen"):
            where = f" ({check.node})" if check.node else ""
            yield f"{check.id}{where}: {check.observed}; needed: {check.needed}"
    yield f"doctor: {summary(report)}"


def summary(report: Report) -> str:
    """Say in one line how it stands."""
    counted: Counter[str] = Counter(check.verdict for check in report.checks)
    parts = [f"{counted[verdict]} {_WORDS.get(verdict, verdict)}" for verdict in _ORDER if counted[verdict]]
    unseen = [f"the {role} could not be looked at" for role in report.unseen]
    return ", ".join([*unseen, *parts])


def _checks_table(checks: Sequence[Check], *, shows_all: bool) -> Table:
    """Put the checks of both nodes side by side; a row is as bad as its worse half, and those of the pair span both."""
    rows: dict[tuple[str, int], dict[str, Check]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for check in checks:
        rows.setdefault((check.id, seen[check.id, check.node]), {})[check.node] = check
        seen[check.id, check.node] += 1
    worst = {key: min(_ORDER.index(one.verdict) for one in row.values()) for key, row in rows.items()}
    shown = [key for key in rows if shows_all or _ORDER[worst[key]] != "ok"]
    lines: list[tuple[Text | str, ...]] = []
    for key in sorted(shown, key=worst.__getitem__):
        row, verdict = rows[key], _ORDER[worst[key]]
        cells = [_cell(row[node]) if node in row else "" for node in ("head", "worker")]
        if "" in row:
            cells[0] = _cell(row[""])
        shown_verdict = Text(_WORDS.get(verdict, verdict), STYLES[verdict])
        lines.append((shown_verdict, key[0], *cells, next(iter(row.values())).needed))
    table = make_table("verdict", "check", "head", "worker", "needed", rows=lines)
    table.columns[1].no_wrap = True  # an id is pasted to --explain
    return table


def _cell(check: Check) -> Text:
    return Text(check.observed, "" if check.verdict == "ok" else STYLES[check.verdict])
