"""Cases as data: every file of `tests/cases/<room>` is one test."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
CASES = ROOT / "tests" / "cases"
# Below what the kernel gives to whoever connects: such a port could be taken before its listener is there.
_PORTS = itertools.count(12_000 + os.getpid() % 8_000)


def case_files(room: str, suffix: str = ".json") -> list[Path]:
    """List the case files of a room; none at all would be a test that cannot fail."""
    found = sorted((CASES / room).glob(f"*{suffix}"))
    if not found:
        raise AssertionError(f"no cases for {room}")
    return found


def read_case(path: Path) -> Any:
    """Read one JSON case."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_rows(room: str, name: str) -> list[dict[str, Any]]:
    """Read a file that holds a list of small cases."""
    rows: list[dict[str, Any]] = read_case(CASES / room / f"{name}.json")
    return rows


def row_name(row: dict[str, Any]) -> str:
    """Name a case in pytest's list."""
    return str(row["name"])


def free_port() -> int:
    """Give a port of loopback that nobody has; never the same one twice."""
    for port in _PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def wait_for(true: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Poll until something holds; fail with its name after `seconds`."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.01)
