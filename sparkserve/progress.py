"""How a plan under way is shown: live bars on a terminal, one line per interval in a pipe, nothing when quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkserve.errors import SparkserveError
from sparkserve.plan import Applied, Change, Plan, Reporter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

Say = Callable[[str], None]


@dataclass
class Group:
    """All changes of one step on one node, shown together; sizes in bytes."""

    node: str
    step: str
    sizes: dict[str, int] = field(default_factory=dict)
    finished: int = 0
    note: str = ""
    begun: float | None = None
    partial: dict[str, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of changes."""
        return len(self.sizes)

    @property
    def total(self) -> int:
        """Bytes of all changes together."""
        return sum(self.sizes.values())

    @property
    def done(self) -> int:
        """Bytes done in all changes of the group."""
        return sum(self.partial.values())

    @property
    def rate(self) -> float:
        """Bytes per second since the group began."""
        elapsed = time.monotonic() - self.begun if self.begun else 0.0
        return self.done / elapsed if elapsed > 0.5 else 0.0

    def describe(self) -> str:
        """Tell how far the group is, in one line."""
        parts = [f"{self.node}: {self.step}"]
        if self.count > 1:
            parts.append(f"{self.finished} of {self.count}")
        if self.total:
            parts.append(f"{amount(self.done)} of {amount(self.total)}")
        if self.rate and self.done < self.total:
            parts.append(f"{amount(int(self.rate))}/s, {duration((self.total - self.done) / self.rate)} left")
        if self.note:
            parts.append(self.note)
        return f"{parts[0]} {', '.join(parts[1:])}".rstrip()


def amount(size: int) -> str:
    """Show bytes with one decimal in the unit that fits."""
    for unit, power in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= power:
            return f"{size / power:.1f} {unit}"
    return f"{size} B"


def duration(seconds: float) -> str:
    """Show seconds as people say them."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def group_changes(plan: Plan) -> dict[tuple[str, str], Group]:
    """Group the changes of a plan by node and step."""
    groups: dict[tuple[str, str], Group] = {}
    for change in plan.changes:
        group = groups.setdefault((change.node, change.step), Group(change.node, change.step))
        group.sizes[change.key] = change.size
    return groups


class GroupReporter:
    """Keeps the groups up to date; subclasses decide what is shown of them."""

    def __init__(self, plan: Plan) -> None:
        self.groups = group_changes(plan)

    def show(self, group: Group) -> None:
        """Show that a group moved."""

    def say(self, text: str) -> None:
        """Show one line that stays."""

    def _group(self, change: Change) -> Group:
        return self.groups[change.node, change.step]

    def started(self, change: Change) -> None:
        """See `Reporter`."""
        group = self._group(change)
        group.begun = group.begun or time.monotonic()
        group.note = change.resource
        self.show(group)

    def progress(self, change: Change, done: int, total: int) -> None:
        """See `Reporter`."""
        group = self._group(change)
        group.partial[change.key] = done
        group.sizes[change.key] = max(total, change.size)
        self.show(group)

    def note(self, change: Change, text: str) -> None:
        """See `Reporter`."""
        group = self._group(change)
        group.note = text
        self.show(group)

    def finished(self, applied: Applied) -> None:
        """See `Reporter`."""
        group = self._group(applied.change)
        group.finished += 1
        if applied.change.size:
            group.partial[applied.change.key] = applied.change.size
        if group.count == 1:
            self.say(f"{group.node}: {group.step} done: {applied.proof}")
        elif group.finished == group.count:
            self.say(f"{group.node}: {group.step} done: {group.count} proved, {amount(group.total)}")
        self.show(group)

    def failed(self, change: Change, error: SparkserveError) -> None:
        """See `Reporter`."""
        self.say(f"{change.node}: {change.step} {change.resource} failed: {error.message}")


class LineReporter(GroupReporter):
    """One line per interval and group, for pipes and logs."""

    def __init__(self, plan: Plan, say: Say, interval: float = 10.0) -> None:
        super().__init__(plan)
        self._say = say
        self._interval = interval
        self._shown: dict[int, tuple[float, str]] = {}

    def show(self, group: Group) -> None:
        """See `GroupReporter`."""
        now = time.monotonic()
        then, _ = self._shown.get(id(group), (0.0, ""))
        text = group.describe()
        if now - then >= self._interval:
            self._shown[id(group)] = (now, text)
            self._say(text)

    def say(self, text: str) -> None:
        """See `GroupReporter`."""
        self._say(text)


class LiveReporter(GroupReporter):
    """A bar per node and step with rate and time left."""

    def __init__(self, plan: Plan, console: Console, progress: Progress) -> None:
        super().__init__(plan)
        self._console = console
        self._progress = progress
        self._tasks: dict[int, Any] = {}

    def show(self, group: Group) -> None:
        """See `GroupReporter`."""
        if id(group) not in self._tasks:
            self._tasks[id(group)] = self._progress.add_task("", total=None)
        total = float(group.total) if group.total else None
        finished = group.finished == group.count
        self._progress.update(
            self._tasks[id(group)],
            description=group.describe(),
            total=total or (1.0 if finished else None),
            completed=float(group.done) if group.total else float(finished),
            visible=not finished,
        )

    def say(self, text: str) -> None:
        """See `GroupReporter`."""
        self._console.print(text, markup=False, highlight=False)


@contextmanager
def live(plan: Plan, console: Console) -> Iterator[Reporter]:
    """Show a plan as bars while the block runs."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        yield LiveReporter(plan, console, progress)
