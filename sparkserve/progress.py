"""How a plan under way is shown: live bars on a terminal, one line per interval in a pipe, nothing when quiet."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkserve.errors import SparkserveError
from sparkserve.plan import ASIDE, Applied, Change, Plan, Reporter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

Say = Callable[[str], None]
# So far back the rate looks: long enough to be calm, short enough to follow a line that became slower.
_RATE_SECONDS = 30.0
# From this size on a file is shown on its own.
_LARGE_BYTES = 1_000_000_000
_NUMBER = re.compile(r"[\d.]+")


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
    kept: int = 0
    moments: deque[tuple[float, int]] = field(default_factory=deque)

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

    def begin(self) -> None:
        """Note when the first change begins."""
        if self.begun is None:
            self.begun = time.monotonic()
            self.moments.append((self.begun, 0))

    def advance(self, key: str, done: int) -> None:
        """Note how far a change is; what it finds done already, from an earlier run, has no part in the rate."""
        if key not in self.partial:
            self.kept += done
        self.partial[key] = done
        now = time.monotonic()
        if not self.moments or now - self.moments[-1][0] >= 1.0:
            self.moments.append((now, self.done - self.kept))
        while now - self.moments[0][0] > _RATE_SECONDS:
            self.moments.popleft()

    @property
    def rate(self) -> float:
        """Bytes per second over the last while."""
        then, moved = self.moments[0] if self.moments else (time.monotonic(), 0)
        elapsed = time.monotonic() - then
        return max(0.0, (self.done - self.kept - moved) / elapsed) if elapsed > 0.5 else 0.0

    @property
    def large(self) -> list[str]:
        """How far each large file is that is under way."""
        rows = [(key, done, self.sizes[key]) for key, done in self.partial.items()]
        under_way = [row for row in rows if row[1] < row[2] >= _LARGE_BYTES]
        return [f"{key.rpartition('/')[2]} {100 * done // size} %" for key, done, size in under_way]

    def describe(self) -> str:
        """Tell how far the group is, in one line."""
        parts = [f"{self.node}: {self.step}"]
        if self.count > 1:
            parts.append(f"{self.finished} of {self.count}")
        if self.total:
            parts.append(f"{amount(self.done)} of {amount(self.total)}")
        if self.rate and self.done < self.total:
            parts.append(f"{amount(int(self.rate))}/s, {duration((self.total - self.done) / self.rate)} left")
        parts += self.large
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


class GroupReporter(Reporter):
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
        group.begin()
        group.note = "" if change.size >= _LARGE_BYTES else change.resource
        self.show(group)

    def progress(self, change: Change, done: int, total: int) -> None:
        """See `Reporter`."""
        group = self._group(change)
        group.sizes[change.key] = max(total, change.size)
        group.advance(change.key, done)
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
            group.partial.setdefault(applied.change.key, 0)
            group.advance(applied.change.key, group.sizes[applied.change.key])
        if group.count == 1:
            self.say(f"{group.node}: {group.step} done: {applied.proof}")
        else:
            self._end(group)
        self.show(group)

    def _end(self, group: Group) -> None:
        if group.finished == group.count > 0:
            self.say(f"{group.node}: {group.step} done: {group.count} proved, {amount(group.total)}")

    def left_alone(self, change: Change) -> None:
        """See `Reporter`: it does not count any more."""
        group = self._group(change)
        for sizes in (group.sizes, group.partial):
            sizes.pop(change.key, None)
        self._end(group)
        self.show(group)

    def failed(self, change: Change, error: SparkserveError) -> None:
        """See `Reporter`."""
        self.say(f"{change.node}: {change.step} {change.resource} failed: {error.message}")


class LineReporter(GroupReporter):
    """One line per interval and group, for pipes and logs; what counts no bytes also tells its new phases at once."""

    def __init__(self, plan: Plan, say: Say, interval: float = 10.0, phase_interval: float = 60.0) -> None:
        super().__init__(plan)
        self._say = say
        self._interval = interval
        self._phase_interval = phase_interval
        self._said: dict[int, float] = {}
        self._phases: set[str] = set()

    def show(self, group: Group) -> None:
        """See `GroupReporter`."""
        now, text = time.monotonic(), group.describe()
        # Seconds, gigabytes and layers go on within a phase.
        phase = "" if group.total else _NUMBER.sub("", text.partition(ASIDE)[0])
        is_new = bool(phase) and phase not in self._phases
        interval = self._interval if group.total else self._phase_interval
        if is_new or now - self._said.get(id(group), float("-inf")) >= interval:
            self._said[id(group)] = now
            self._phases.add(phase)
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
