"""Small files that are replaced as a whole; of our state directory's an unreadable one is as none."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any


def write(path: Path, data: object, indent: int | None = None) -> None:
    """Write an object to a file that only its owner can read, and its directory where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_text(path, json.dumps(data, indent=indent), mode=0o600)


def write_text(path: Path, text: str, *, mode: int = 0o644, durable: bool = False) -> None:
    """Write a file beside its goal and rename it; a failure leaves nothing."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.chmod(mode)
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
