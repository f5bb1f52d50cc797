"""The results of `init`, `key` and `connect` as tables and rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from sparkserve.checks import show_size
from sparkserve.hosts import mask
from sparkserve.tables import make_table, value_table

if TYPE_CHECKING:
    from sparkserve.api_client import Access
    from sparkserve.setup import Seen, Setup


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


def planned_view(found: Setup) -> str:
    """Show the file that would be written; its token is nobody's to see."""
    return f"{mask(found.text, [found.loaded.settings.hf_token])}\nnothing was written to {found.env_file}"


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
