"""Changes, the plan that holds them, and the one function that carries a plan out."""

from __future__ import annotations

import graphlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from sparkserve.errors import Failures, SparkserveError, flatten

# How many changes of one kind run side by side on one node; the rest share the default.
DEFAULT_WIDTHS: Mapping[str, int] = {"download": 3, "copy": 3, "hash": 6, "image": 1, "sudo": 1}
_DEFAULT_WIDTH = 4
# After this many failures of one kind the rest of that kind is not tried: forty times the same answer helps nobody.
_LANE_PATIENCE = 2
# What follows it in a note is shown beside the rest, and makes no news of its own.
ASIDE = " | "


class Cancelled(Exception):
    """The run was interrupted while this change was under way."""


class LeftAlone(Exception):
    """What was found is not what the change could take: its words say why; it is neither done nor failed."""


@dataclass(frozen=True)
class Change:
    """One difference between what is and what is wanted, and the action that removes it.

    `needs` are keys of other changes; a key that is in no plan holds already. The action returns its proof: what was
    observed afterwards, in a few words.
    """

    node: str
    step: str
    resource: str
    before: str
    after: str
    action: Callable[[Work], str] = field(repr=False, compare=False)
    needs: tuple[str, ...] = ()
    lane: str = ""
    size: int = 0

    @property
    def key(self) -> str:
        """Name of this change within a plan."""
        return key_of(self.node, self.step, self.resource)


def key_of(node: str, step: str, resource: str) -> str:
    """Give the key under which other changes can need this one."""
    return f"{node}/{step}/{resource}"


@dataclass(frozen=True)
class Plan:
    """All changes of a run, in the order in which they are shown; `later` are those left to other commands."""

    changes: tuple[Change, ...]
    later: tuple[Change, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether everything is as wanted already."""
        return not self.changes

    def __post_init__(self) -> None:
        doubled = [key for key, count in Counter(change.key for change in self.changes).items() if count > 1]
        if doubled:
            raise ValueError(f"changes planned twice: {doubled}")
        # A circle is a bug of ours: it must show before the first change, not after half of them.
        graphlib.TopologicalSorter({change.key: change.needs for change in self.changes}).prepare()


@dataclass(frozen=True)
class Applied:
    """A change that was carried out and its proof; times are seconds of the monotonic clock."""

    change: Change
    proof: str
    begun: float
    ended: float


@dataclass
class ApplyReport:
    """What was really done, apart from what was planned."""

    applied: list[Applied] = field(default_factory=list)
    failed: list[tuple[Change, SparkserveError]] = field(default_factory=list)
    not_reached: list[Change] = field(default_factory=list)
    left_alone: list[tuple[Change, str]] = field(default_factory=list)

    def raise_failures(self) -> None:
        """Raise what failed: one error for each kind and node, with all that met the same in its details."""
        kinds: dict[tuple[str, str, str], list[SparkserveError]] = {}
        for error in (single for _, failed in self.failed for single in flatten(failed)):
            kinds.setdefault((error.code, error.node, error.hint), []).append(error)
        if kinds:
            failures = Failures([_join(same) for same in kinds.values()])
            failures.report = self
            raise failures


def _join(same: list[SparkserveError]) -> SparkserveError:
    """Make one error of several that differ in their messages at most."""
    first, *others = {error.message: error for error in same}.values()
    details = [first.details, *(error.message for error in others)]
    return replace(first, details="\n".join(filter(None, details)))


class Reporter:
    """Who is told how a plan goes; called from several threads, one call at a time. This one keeps it to itself."""

    def started(self, change: Change) -> None:
        """Tell that a change begins."""

    def progress(self, change: Change, done: int, total: int) -> None:
        """Tell how far a change is."""

    def note(self, change: Change, text: str) -> None:
        """Tell what a change is doing now."""

    def finished(self, applied: Applied) -> None:
        """Tell that a change is done and proved."""

    def failed(self, change: Change, error: SparkserveError) -> None:
        """Tell that a change failed."""

    def left_alone(self, change: Change) -> None:
        """Tell that a change was not made, without a failure; the report says why."""


def _lane_of(change: Change) -> tuple[str, str]:
    return change.node, change.lane


class _Run:
    """One application of a plan: a thread per running change, all state under one condition."""

    def __init__(self, plan: Plan, reporter: Reporter, widths: Mapping[str, int]) -> None:
        self.waiting = list(plan.changes)
        self.planned = {change.key for change in plan.changes}
        self.running: dict[str, Change] = {}
        self.threads: list[threading.Thread] = []
        self.done: set[str] = set()
        self.broken: set[str] = set()
        self.lane_failures: Counter[tuple[str, str]] = Counter()
        self.bugs: list[BaseException] = []
        self.report = ApplyReport()
        self.reporter = reporter
        self.widths = widths
        self.changed = threading.Condition()
        self.cancelled = threading.Event()

    def next_ready(self) -> Change | None:
        busy = Counter(_lane_of(change) for change in self.running.values())
        for change in self.waiting:
            free = busy[_lane_of(change)] < self.widths.get(change.lane, _DEFAULT_WIDTH)
            if free and all(need in self.done or need not in self.planned for need in change.needs):
                return change
        return None

    def drop_unreachable(self) -> None:
        """Take out what waits for a failed change, or belongs to a kind that keeps failing."""
        while True:
            hopeless = [
                change
                for change in self.waiting
                if self.cancelled.is_set()
                or (change.lane and self.lane_failures[_lane_of(change)] >= _LANE_PATIENCE)
                or any(need in self.broken for need in change.needs)
            ]
            if not hopeless:
                return
            for change in hopeless:
                self.waiting.remove(change)
                self.broken.add(change.key)
                self.report.not_reached.append(change)

    def carry_out(self, change: Change) -> None:
        begun = time.monotonic()
        try:
            proof = change.action(Work(self, change))
        except Cancelled:
            self._end(change, lambda: self.report.not_reached.append(change), works=False)
        except LeftAlone as reason:
            why = str(reason)
            self._end(change, lambda: self._leave(change, why), works=False)
        except SparkserveError as error:
            error.node = error.node or change.node
            failure = error
            self._end(change, lambda: self._fail(change, failure), works=False)
        except BaseException as error:  # noqa: BLE001 - a bug of ours: it is raised again by the main thread
            bug = error
            self._end(change, lambda: self.bugs.append(bug), works=False)
        else:
            applied = Applied(change, proof, begun, time.monotonic())
            self._end(change, lambda: self._finish(applied), works=True)

    def _finish(self, applied: Applied) -> None:
        self.report.applied.append(applied)
        self.reporter.finished(applied)

    def _leave(self, change: Change, why: str) -> None:
        self.report.left_alone.append((change, why))
        self.reporter.left_alone(change)

    def _fail(self, change: Change, error: SparkserveError) -> None:
        self.report.failed.append((change, error))
        self.lane_failures[_lane_of(change)] += 1
        self.reporter.failed(change, error)

    def _end(self, change: Change, tell: Callable[[], None], *, works: bool) -> None:
        with self.changed:
            del self.running[change.key]
            (self.done if works else self.broken).add(change.key)
            try:
                tell()
            except BaseException as error:  # noqa: BLE001 - the reporter's bug, raised by the main thread as well
                self.bugs.append(error)
            if self.bugs:
                self.cancelled.set()
            self.changed.notify_all()

    def loop(self, is_wanted: Callable[[], bool]) -> None:
        with self.changed:
            while self.waiting or self.running:
                if not is_wanted():
                    raise KeyboardInterrupt
                self.drop_unreachable()
                change = self.next_ready()
                if change is not None:
                    self.reporter.started(change)
                    self.waiting.remove(change)
                    self.running[change.key] = change
                    thread = threading.Thread(target=self.carry_out, args=(change,), name=change.key, daemon=True)
                    self.threads.append(thread)
                    thread.start()
                elif self.running:
                    self.changed.wait(0.5)
                elif self.waiting:
                    raise ValueError(f"changes that can never begin: {[change.key for change in self.waiting]}")

    def drain(self, seconds: float) -> None:
        """After an interrupt: give running changes time to end cleanly."""
        self.cancelled.set()
        deadline = time.monotonic() + seconds
        with self.changed:
            # The interrupt may have come before a thread began: nobody would tell the end of its change.
            while any(thread.is_alive() for thread in self.threads) and time.monotonic() < deadline:
                self.changed.wait(0.2)
            self.report.not_reached += [*self.running.values(), *self.waiting]


class Work:
    """What a running change can say and ask."""

    def __init__(self, run: _Run, change: Change) -> None:
        self._run = run
        self._change = change

    def progress(self, done: int, total: int) -> None:
        """Tell how many of `total` bytes (or units) are done."""
        with self._run.changed:
            self._run.reporter.progress(self._change, done, total)

    def note(self, text: str) -> None:
        """Tell what is being done now, in a few words."""
        with self._run.changed:
            self._run.reporter.note(self._change, text)

    def check(self) -> None:
        """Raise `Cancelled` when the run was interrupted."""
        if self._run.cancelled.is_set():
            raise Cancelled


class Interrupted(KeyboardInterrupt):
    """The run was interrupted; `report` says what is done, `exit_code` is 130 or 143."""

    def __init__(self, report: ApplyReport, exit_code: int = 130) -> None:
        super().__init__()
        self.report = report
        self.exit_code = exit_code


def apply(
    plan: Plan,
    reporter: Reporter,
    widths: Mapping[str, int] = DEFAULT_WIDTHS,
    is_wanted: Callable[[], bool] = lambda: True,
) -> ApplyReport:
    """Carry out a plan; changes whose needs are met run side by side, and a failure stops only what needs it.

    Once it is wanted no more it ends as if its owner had interrupted it.
    """
    run = _Run(plan, reporter, widths)
    try:
        run.loop(is_wanted)
    except KeyboardInterrupt as error:
        run.drain(20)
        raise Interrupted(run.report, getattr(error, "exit_code", 130)) from None
    except BaseException:
        run.drain(20)
        raise
    if run.bugs:
        raise run.bugs[0]
    # Which of them is told first decides the exit code: the plan says so, and not the clock.
    run.report.failed.sort(key=lambda failed: plan.changes.index(failed[0]))
    return run.report


def select(changes: Iterable[Change], steps: Iterable[str]) -> tuple[Plan, list[Change]]:
    """Give the plan of a command that covers only some steps, and the pending changes of other steps that it needs."""
    every = {change.key: change for change in Plan(tuple(changes)).changes}
    wanted = set(steps)
    chosen = tuple(change for change in every.values() if change.step in wanted)
    needed = {change.key for change in chosen}
    found = list(chosen)
    while found:
        more = [need for need in found.pop().needs if need in every and need not in needed]
        needed.update(more)
        found += [every[need] for need in more]
    later = tuple(change for change in every.values() if change.step not in wanted)
    return Plan(chosen, later), [every[key] for key in every if key in needed and every[key].step not in wanted]
