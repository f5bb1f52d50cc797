"""How long the installed command takes before it does anything: help, settings, imports."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from tests.bench.figures import Figure, median_of_pairs, median_seconds, run_quietly

RUNS = 11
ENV = "SPARKSERVE_WORKER=worker.example\nSPARKSERVE_HEAD_LINK=192.168.100.10\nSPARKSERVE_WORKER_LINK=192.168.100.11\n"


def measure() -> Iterator[Figure]:
    """Time the command that a user types, and what its imports alone cost."""
    command = Path(sys.executable).with_name("sparkserve")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / ".env").write_text(ENV)
        run = partial(run_quietly, folder=Path(folder), environment=_clean_environment(folder))
        yield Figure("help_seconds", median_seconds(lambda: run([str(command), "--help"]), RUNS), "s", 0.20)
        yield Figure("config_seconds", median_seconds(lambda: run([str(command), "config"]), RUNS), "s", 0.60)
        yield Figure("plan_seconds", median_seconds(lambda: run([str(command), "plan"]), RUNS), "s", 0.50)
        imports = median_of_pairs(
            lambda: run([sys.executable, "-c", "import sparkserve.cli"]),
            lambda: run([sys.executable, "-c", "pass"]),
            RUNS,
            lambda with_import, without: with_import - without,
        )
        yield Figure("import_seconds", imports, "s", 0.15, note="import of sparkserve.cli, without the start of Python")


def _clean_environment(home: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8"}
