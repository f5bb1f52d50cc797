"""What a figure is, when it holds, and how times and ratios are taken."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Verdict = Literal["ok", "short", "n/a"]


@dataclass(frozen=True)
class Figure:
    """A measured value beside its limit; without a value the peer of the comparison could not be had."""

    name: str
    value: float | None
    unit: str
    limit: float
    better: Literal["less", "more"] = "less"
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether the value holds its limit."""
        if self.value is None:
            return "n/a"
        holds = self.value <= self.limit if self.better == "less" else self.value >= self.limit
        return "ok" if holds else "short"

    def line(self) -> str:
        """Write the figure as the one line that people and programs read."""
        value = "n/a" if self.value is None else f"{self.value:.4g}"
        return f"figure {self.name} {value} {self.unit} limit {self.limit:.4g} {self.verdict}"


def connections(name: str, counts: Iterable[int]) -> Figure:
    """Tell how many logins at the worker a command made at most: one is right, and without any it did not look."""
    seen = list(counts)
    if 0 in seen:
        raise RuntimeError(f"{name}: without any login, one by one {seen}")
    return Figure(name, max(seen), "connections", 1)


def median_seconds(action: Callable[[], object], runs: int) -> float:
    """Time an action several times, after one run that nobody counts, and take the median."""
    action()
    return statistics.median(_seconds(action) for _ in range(runs))


def median_of_pairs(
    ours: Callable[[], object], theirs: Callable[[], object], pairs: int, combine: Callable[[float, float], float]
) -> float:
    """Time two actions by turns and take the median of what each pair gives, so that drift of the machine cancels."""
    ours()
    theirs()
    results = []
    for number in range(pairs):
        # Who goes first changes, since the first may find the caches colder.
        order = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        times = {action: _seconds(action) for action in order}
        results.append(combine(times[ours], times[theirs]))
    return statistics.median(results)


def run_quietly(argv: Sequence[str], *, folder: Path | None = None, environment: dict[str, str] | None = None) -> None:
    """Run a command to its end; a failure would make its time worthless, and stops the bench."""
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
