"""The results of `init`, `connect` and `plan --against-running`, for people and for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sparkserve.checks import show_size
from sparkserve.hosts import mask
from sparkserve.tables import make_table, value_table

if TYPE_CHECKING:
    from sparkserve.api_client import Access
    from sparkserve.setup import Seen, Setup
    from sparkserve.takeover_story import Comparison, Taken


def seen_table(found: Setup) -> Table:
    """Show both nodes side by side."""
    rows = {role: _seen_rows(seen) for role, seen in found.seen.items()}
    names = next(iter(rows.values()))
    return make_table("", *rows, rows=([name, *(own[name] for own in rows.values())] for name in names))


def _seen_rows(seen: Seen) -> dict[str, str]:
    facts = seen.system
    home = facts.disks["models"]
    free, total = (show_size(facts.memory.get(name, 0)) for name in ("MemAvailable", "MemTotal"))
    ports = {device.interface for device in seen.link.devices if device.active}
    cable = [
        f"{one.name} {', '.join(one.addresses) or 'no address'}, MTU {one.mtu}"
        for one in seen.link.interfaces
        if one.name in ports
    ]
    return {
        "host": f"{facts.hostname} ({facts.user}), {facts.system}, {facts.machine}",
        "GPU": " ".join(facts.gpu or ("nvidia-smi gives no answer",)),
        "memory": f"{free} free of {total}",
        "disk": f"{show_size(home.free)} free at {home.path}",
        "Docker": facts.docker.version or facts.docker.error,
        "cable": "\n".join(cable) or "no active RDMA port",
    }


def setup_data(found: Setup) -> dict[str, Any]:
    """Give what was seen and decided as plain data."""
    told = {name: getattr(found, name) for name in ("env_file", "values", "trusted", "notes")}
    nodes = {role: _seen_rows(seen) for role, seen in found.seen.items()}
    return {**told, "nodes": nodes, "link": found.proposal}


def planned_view(found: Setup, taken: Taken | None = None) -> list[str]:
    """Show the files that would be written; a token is nobody's to see."""
    secret_files = taken.secret_files if taken else ()
    return [
        *([f"# {taken.recipe}\n{taken.text}"] if taken else []),
        f"# {found.env_file}\n{mask(found.text, [found.loaded.settings.hf_token])}",
        *(f"secrets of theirs would be in {path} (mode 0600), and nowhere else" for path in secret_files),
        f"nothing was written to {found.env_file}",
    ]


def access_view(found: Access, key: str) -> list[Table | str]:
    """Show what is typed into an app, then both requests as they can be pasted."""
    rows = {
        "base URL": found.base_url,
        "model name": found.model,
        "API key": key or (f"the content of {found.key_file}" if found.key_file else "any text"),
        "from another machine": " or ".join(found.remote_urls),
        **({"while this runs there": found.tunnel} if found.tunnel else {}),
    }
    return [value_table(rows), f"\n{found.curl}\n", found.python]


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
