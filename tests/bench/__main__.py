"""Measure, print one line a figure, write the same as JSON; exit 1 when a figure is short of its limit."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from tests.bench import groups
from tests.bench.figures import Figure

RESULTS = Path(__file__).parents[2] / ".bench" / "results.json"


def main(words: list[str] | None = None, results: Path = RESULTS) -> int:
    """Measure the groups that are named, or all."""
    known = sorted(module.name for module in pkgutil.iter_modules(groups.__path__))
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("group", nargs="*", help=f"groups to measure, out of: {', '.join(known)}; all by default")
    wanted = parser.parse_args(words).group or known
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"no group {', '.join(unknown)}; there are: {', '.join(known)}")
    return report({name: importlib.import_module(f"{groups.__name__}.{name}").measure() for name in wanted}, results)


def report(measured: Mapping[str, Iterable[Figure]], results: Path) -> int:
    """Print each figure as it comes and write all of them, also when one cannot be had; fail when one is short."""
    rows = []
    try:
        for group, figures in measured.items():
            for figure in figures:
                print(figure.line(), flush=True)
                rows.append({"group": group, **asdict(figure), "verdict": figure.verdict})
    finally:
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps({"schema": 1, "figures": rows}, indent=2) + "\n")
    return 1 if any(row["verdict"] == "short" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
