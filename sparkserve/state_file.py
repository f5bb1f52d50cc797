"""Small JSON files of our state directory: replaced as a whole, and an unreadable one is as none."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write(path: Path, data: object, indent: int | None = None) -> None:
    """Write a file beside its goal and rename it; only the owner can read it, and a failure leaves nothing."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(data, indent=indent), encoding="utf-8")
        beside.chmod(0o600)
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def read(path: Path) -> dict[str, Any]:
    """Read a file that holds one object; empty where there is none, or half of one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
