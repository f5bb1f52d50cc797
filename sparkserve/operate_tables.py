"""What the commands of a running pair show: for people as lines and tables, for programs as rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from sparkserve.checks import show_size
from sparkserve.cluster import ROLES, Role
from sparkserve.progress import amount, duration
from sparkserve.status import uptime
from sparkserve.tables import make_table

if TYPE_CHECKING:
    from sparkserve.around import AroundFacts, GpuFacts, Trend
    from sparkserve.diagnose import Archive
    from sparkserve.operations import View
    from sparkserve.records import Record
    from sparkserve.watch import Event

_FIGURES = {"requests_running": "running", "requests_waiting": "waiting", "tokens_per_second": "tokens/s"}


def status_data(found: View) -> dict[str, Any]:
    """Give a status as plain data."""
    status, evidence = found.status, found.status.evidence
    last = evidence.samples[-1] if evidence.samples else None
    return {
        "state": status.verdict.state,
        "reasons": list(status.verdict.reasons),
        "uptime_seconds": uptime(status.facts),
        "context": found.context,
        "requests_running": last.running if last else None,
        "requests_waiting": last.waiting if last else None,
        "tokens_per_second": evidence.tokens_per_second if evidence.in_flight else None,
        "phases": dict(evidence.phases),
        "nodes": {role: _node_data(found, role) for role in ROLES if role in status.facts},
    }


def _node_data(found: View, role: Role) -> dict[str, Any]:
    facts = found.status.facts[role]
    container = facts.of_rank(ROLES.index(role))
    return {
        "container": container.describe() if container else "absent",
        "spec": container.spec if container else None,
        "run": container.run if container else None,
        "recipe": container.recipe if container else None,
        "memory_total_bytes": facts.memory.total,
        "memory_available_bytes": facts.memory.available,
        "swap_used_bytes": facts.memory.swap_used,
        "around": found.around.get(role),
        "trend": found.trends.get(role),
    }


def status_view(found: View) -> list[Table | str]:
    """Show how the pair is on one screen: the state and why, then what each node has."""
    data, verdict = status_data(found), found.status.verdict
    shown = [f"{name} {data[key]:.0f}" for key, name in _FIGURES.items() if data[key] is not None]
    if found.context:
        shown.insert(0, f"context {found.context:,}")
    if data["uptime_seconds"] is not None:
        shown.insert(0, f"up {duration(data['uptime_seconds'])}")
    rows: list[tuple[str, ...]] = []
    for role, node in data["nodes"].items():
        memory = f"{show_size(node['memory_available_bytes'])} of {show_size(node['memory_total_bytes'])}"
        trend, around = node["trend"], node["around"]
        cells = (_memory_trend(trend), _swap(node["swap_used_bytes"], trend), _gpu(around), _link(around, trend))
        rows.append((role, node["container"], memory, *cells))
    rows += [(role, f"could not look: {error.message}") for role, error in found.status.unseen.items()]
    table = make_table("node", "container", "memory available", "trend", "swap used", "GPU", "link", rows=rows)
    # What is missing or other than wanted, a start makes right: it replaces both ranks.
    hint = ["hint: sparkserve start"] if verdict.state == "degraded" else []
    return [f"{verdict.state}: {'; '.join(verdict.reasons)}\n{', '.join(shown)}".rstrip(), table, *hint]


def status_line(found: View) -> str:
    """Say how the pair is in one line, for a pipe."""
    data, verdict = status_data(found), found.status.verdict
    shown = [f"{name} {data[key]:.0f}" for key, name in _FIGURES.items() if data[key] is not None]
    parts = (time.strftime("%H:%M:%S"), verdict.state, ", ".join(shown), "; ".join(verdict.reasons))
    return "  ".join(filter(None, parts))


def _memory_trend(trend: Trend | None) -> str:
    if trend is None or trend.memory_per_hour is None:
        return ""
    return f"{trend.memory_per_hour / 2**30:+.2f} GiB/h over {trend.hours:.1f} h"


def _swap(used: int, trend: Trend | None) -> str:
    moved = "" if trend is None or trend.swap_per_hour is None else f", {trend.swap_per_hour / 2**30:+.2f} GiB/h"
    return f"{show_size(used)}{moved}"


def _gpu(around: AroundFacts | None) -> str:
    gpu: GpuFacts | None = around.gpu if around else None
    if gpu is None:
        return "no answer" if around else ""
    values = ((gpu.clock_mhz, "MHz"), (gpu.power_watts, "W"), (gpu.temperature, "C"), (gpu.busy_percent, "% busy"))
    return ", ".join(f"{value:.0f} {unit}" for value, unit in values if value is not None)


def _link(around: AroundFacts | None, trend: Trend | None) -> str:
    if around is None:
        return ""
    speed = f", {around.speed_mbps / 1000:g} Gbit/s" if around.speed_mbps else ""
    new = ", ".join(f"{name} +{count}" for name, count in trend.new_errors.items()) if trend else ""
    return f"{around.interface or 'none'} {'up' if around.up else 'down'}{speed}, {new or 'no new errors'}"


def event_line(event: Event) -> str:
    """Show one event of a watch."""
    return f"{_moment(event.at)}  {event.kind.replace('_', ' ')}: {event.text}"


def history_rows(found: Sequence[Record]) -> list[dict[str, Any]]:
    """Give the recorded starts without what only brings a pair back."""
    return [{key: value for key, value in vars(record).items() if key != "pair"} for record in found]


def history_table(found: Sequence[Record]) -> Table:
    """Show the recorded starts, newest first."""
    rows = []
    for record in found:
        taken = duration(record.seconds) if record.seconds else ""
        begun = _moment(record.begun)
        rows.append((record.run, begun, record.command, record.recipe, record.ending, taken, record.error))
    caption = f"{len(found)} start{'s' * (len(found) != 1)}; `sparkserve logs --run RUN` shows what was kept of one"
    return make_table("run", "when", "command", "recipe", "ending", "time", "why", rows=rows, caption=caption)


def archive_table(found: Archive) -> Table:
    """Show what an archive holds."""
    rows = ((member.name, amount(member.size), member.what) for member in found.members)
    is_where = "would be written" if found.dry_run else "written"
    caption = f"{is_where} to {found.path}; it holds no token and no key: look before you send it"
    return make_table("file", "size", "what it is", rows=rows, caption=caption)


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
