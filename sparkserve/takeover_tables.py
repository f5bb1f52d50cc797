"""A pair that was taken over, and how it differs from ours, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sparkserve.tables import make_table, value_table

if TYPE_CHECKING:
    from sparkserve.takeover_story import Comparison, Taken


def taken_view(found: Taken) -> list[Table | str]:
    """Show what was written, and how to go on."""
    table = value_table(found.settings, caption=f"written to {found.env_file}; the recipe is {found.recipe}")
    kept = [f"secrets of theirs are in {path} (mode 0600), and nowhere else" for path in found.secret_files]
    steps = [
        "to go on, after `sparkserve plan --against-running`:",
        *(f"  {command}   (on the {role}; or your own script's stop)" for role, command in found.stop.items()),
        "  sparkserve start",
    ]
    return [table, "\n".join([*kept, *steps])]


def differences_view(found: Comparison) -> Table | str:
    """Show each difference with its reason; both ranks in one row where they agree."""
    if not found.differences:
        return "what runs is what a start would make"
    nodes: dict[tuple[str, ...], list[str]] = {}
    for row in found.differences:
        key = (f"{row.what} {row.name}".strip(), row.theirs, row.ours, row.reason)
        nodes.setdefault(key, []).append(row.node)
    rows = (
        ("both" if len(own) > 1 else own[0], *cells, reason or Text("unexplained", style="red"))
        for (*cells, reason), own in nodes.items()
    )
    caption = f"{found.unexplained} of {len(found.differences)} are unexplained"
    return make_table("rank", "what", "runs", "ours", "why", rows=rows, caption=caption)


def differences_data(found: Comparison) -> dict[str, Any]:
    """Give all of it to a program."""
    return {"containers": found.pair, "differences": found.differences, "unexplained": found.unexplained}
