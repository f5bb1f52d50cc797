"""The results of `init`, `key` and `connect` as tables and rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sparkserve.checks import show_size
from sparkserve.tables import make_table

if TYPE_CHECKING:
    from sparkserve.api_client import Access
    from sparkserve.setup import Seen, Setup


def seen_table(found: Setup) -> Table:
    """Show both nodes side by side."""
    rows = {role: _seen_rows(seen) for role, seen in found.seen.items()}
    table = make_table("", *rows)
    for name in next(iter(rows.values())):
        table.add_row(name, *(Text(own[name]) for own in rows.values()))
    return table


def _seen_rows(seen: Seen) -> dict[str, str]:
    facts = seen.system
    home = facts.disks["models"]
    ports = {device.interface for device in seen.link.devices if device.active}
    cable = [
        f"{one.name} {', '.join(one.addresses) or 'no address'}, MTU {one.mtu}"
        for one in seen.link.interfaces
        if one.name in ports
    ]
    return {
        "host": f"{facts.hostname} ({facts.user}), {facts.system}, {facts.machine}",
        "GPU": " ".join(facts.gpu or ("nvidia-smi gives no answer",)),
        "memory": f"{show_size(facts.available)} free of {show_size(facts.memory.get('MemTotal', 0))}",
        "disk": f"{show_size(home.free)} free at {home.path}",
        "Docker": facts.docker.version or facts.docker.error,
        "cable": "\n".join(cable) or "no active RDMA port",
    }


def setup_data(found: Setup) -> dict[str, Any]:
    """Give what was seen and decided as plain data."""
    return {
        "env_file": found.env_file,
        "values": found.values,
        "nodes": {role: _seen_rows(seen) for role, seen in found.seen.items()},
        "link": found.proposal,
        "trusted": found.trusted,
        "notes": found.notes,
    }


def setup_view(found: Setup) -> Table:
    """Show what was decided."""
    table = make_table("setting", "value")
    for name, value in found.values.items():
        table.add_row(name, Text(value))
    table.caption = f"written to {found.env_file}"
    return table


def access_data(found: Access, key: str) -> dict[str, Any]:
    """Give all of it as plain data; the key itself only where it was asked for."""
    return {**vars(found), **({"key": key} if key else {})}


def access_view(found: Access, key: str) -> list[Table | str]:
    """Show what is typed into an app, then both requests as they can be pasted."""
    table = make_table("setting", "value")
    table.add_row("base URL", Text(found.base_url))
    table.add_row("model name", Text(found.model))
    table.add_row("API key", Text(key or (f"the content of {found.key_file}" if found.key_file else "any text")))
    table.add_row("from another machine", Text(" or ".join(found.remote_urls)))
    if found.tunnel:
        table.add_row("while this runs there", Text(found.tunnel))
    return [table, f"\n{found.curl}\n", found.python]
