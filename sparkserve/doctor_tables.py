"""A check-up as tables: both nodes side by side, what is not in order first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sparkserve.check_catalog import CATALOG
from sparkserve.checks import Check, Verdict
from sparkserve.tables import STYLES, WORDS, make_table, verdict_text

if TYPE_CHECKING:
    from sparkserve.doctor import Report

_ORDER: tuple[Verdict, ...] = ("fail", "unseen", "warn", "ok")


def report_data(report: Report) -> dict[str, Any]:
    """Give a check-up as plain data."""
    checks = [{**vars(check), "hint": check.advice, "why": CATALOG[check.id].why} for check in report.checks]
    return {
        "verdict": summary(report),
        "checks": checks,
        "differences": [one for one in report.differences if not one.same],
        "recorded": report.recorded,
        "seconds": round(report.seconds, 3),
    }


def report_view(report: Report, *, shows_all: bool = False) -> Iterator[Table | str]:
    """Show a check-up: what is not in order (or all), what puts it right, what differs, and the verdict."""
    yield from checks_view(report.checks, shows_all=shows_all)
    different = [one for one in report.differences if not one.same]
    if different:
        rows = ((one.what, one.head or "-", one.worker or "-") for one in different)
        yield from ("", make_table("differs", "head", "worker", rows=rows))
    if report.recorded:
        yield f"recorded in {report.recorded}"
    yield f"{summary(report)}, in {report.seconds:.1f} s"


def summary(report: Report) -> str:
    """Say in one line how it stands."""
    counted: Counter[str] = Counter(check.verdict for check in report.checks)
    parts = [f"{counted[verdict]} {WORDS.get(verdict, verdict)}" for verdict in _ORDER if counted[verdict]]
    unseen = [f"the {role} could not be looked at" for role in report.unseen]
    return ", ".join([*unseen, *parts])


def checks_view(checks: Sequence[Check], *, shows_all: bool = False) -> Iterator[Table | str]:
    """Show checks with both nodes side by side, the worst first, and then what to type."""
    rows: dict[tuple[str, int], dict[str, Check]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for check in checks:
        rows.setdefault((check.id, seen[check.id, check.node]), {})[check.node] = check
        seen[check.id, check.node] += 1
    worst = {key: min(_ORDER.index(one.verdict) for one in row.values()) for key, row in rows.items()}
    shown = [key for key in rows if shows_all or _ORDER[worst[key]] != "ok"]
    lines = [_check_row(key[0], _ORDER[worst[key]], rows[key]) for key in sorted(shown, key=worst.__getitem__)]
    table = make_table("verdict", "check", "head", "worker", "needed", rows=lines)
    table.columns[1].no_wrap = True  # an id is pasted to --explain
    if table.row_count:
        yield from (table, "")
    advised: dict[tuple[str, str], list[str]] = {}
    for check in sorted(checks, key=lambda check: _ORDER.index(check.verdict)):
        if check.verdict != "ok" and check.advice:
            advised.setdefault((check.id, check.advice), []).append(check.node)
    for (name, advice), nodes in advised.items():
        where = f" ({', '.join(nodes)})" if any(nodes) else ""
        yield f"{name}{where}: {advice}"


def _check_row(name: str, verdict: str, row: Mapping[str, Check]) -> tuple[Text | str, ...]:
    told = {"head": Text(), "worker": Text()}
    for check in row.values():  # what is told of the pair stands with the head
        told[check.node or "head"] = Text(check.observed, "" if check.verdict == "ok" else STYLES[check.verdict])
    return verdict_text(verdict), name, *told.values(), next(iter(row.values())).needed
