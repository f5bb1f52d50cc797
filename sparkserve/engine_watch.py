"""Waiting for a pair to answer: both containers and both logs are watched, and one dead rank ends the wait for both."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from sparkserve.cluster import ROLES, Cluster, Node, Role
from sparkserve.container import ContainerSpec
from sparkserve.endpoint import Endpoint
from sparkserve.engine_facts import (
    LOOK_SECONDS,
    ContainerFacts,
    docker_body,
    gather,
    kernel_lines,
    parse_container,
    parse_memory,
)
from sparkserve.engine_logs import LogFollower, LogLine, find_trouble, last_words, match_failure, match_phase
from sparkserve.engine_stop import all_or_nothing
from sparkserve.errors import SparkserveError
from sparkserve.hosts import mask
from sparkserve.plan import ASIDE, ApplyReport, Work
from sparkserve.readiness import Prober
from sparkserve.recipe import KnownFailure, Recipe
from sparkserve.status import State

_POLL_SECONDS = 0.4
# So long may a node be silent before the start is given up: a machine that loads 100 GB answers late.
_SILENCE_SECONDS = 30.0
# The ranks were made a little before the wait for them began, and the journal tells whole seconds.
_EARLIER_SECONDS = 10.0
_GIB = 2**30
_SHOWN = 70  # characters of a log line
STEP = "start"
OLD_PAIR, READY = "old pair", "ready"


@dataclass(frozen=True)
class Launch:
    """One start: what to run, under which run id, where it must answer, and what must be done before.

    `seen` is the state in which a pair that runs as wanted was seen.
    """

    specs: Mapping[Role, ContainerSpec]
    run: str
    endpoint: Endpoint
    runs_dir: Path
    first_start: bool = False
    seen: State = "starting"
    needs: tuple[str, ...] = ()
    secrets: tuple[SecretStr | None, ...] = ()
    kernels: Mapping[Role, str] = field(default_factory=dict)
    skipped_checks: tuple[str, ...] = ()
    # Filled while the ranks load: when each phase was first seen, in seconds after the wait began, and what runs.
    phases: dict[str, float] = field(default_factory=dict, compare=False)
    images: dict[Role, str] = field(default_factory=dict, compare=False)

    def deadline(self, recipe: Recipe) -> int:
        """Give the longest wait for the engine, in seconds."""
        return recipe.readiness.first_seconds if self.first_start else recipe.readiness.later_seconds


@dataclass(frozen=True)
class _Look:
    container: ContainerFacts
    lines: list[LogLine]
    available: int
    killed_at: int | None
    since_end: float  # by the node's own clock, which may differ from the other's


@dataclass
class _Watch:
    """Everything seen of both ranks while they load."""

    cluster: Cluster
    recipe: Recipe
    launch: Launch
    begun: float = field(default_factory=time.monotonic)
    followers: dict[Role, LogFollower] = field(default_factory=dict)
    lines: list[LogLine] = field(default_factory=list)
    phases: dict[Role, str] = field(default_factory=dict)
    available: dict[Role, int] = field(default_factory=dict)
    heard: dict[Role, float] = field(default_factory=dict)
    warnings: list[KnownFailure] = field(default_factory=list)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begun

    def find_containers(self) -> None:
        """Find both ranks' containers by label."""
        for role, facts in self.cluster.on_both(gather).items():
            rank = ROLES.index(role)
            container = facts.of_rank(rank)
            if container is None:
                message, hint = f"{self.launch.specs[role].name} is not there", "`sparkserve start` makes both anew"
                raise SparkserveError("rank_gone", message, hint, role)
            self.followers[role] = LogFollower(self.cluster.node(role), container.id, rank)
            self.heard[role] = time.monotonic()
            self.launch.images[role] = container.image_id

    def look(self) -> None:
        """Look at both ranks once; raises when one of them ended or said something that means the end."""
        looks, errors = self.cluster.try_both(self._look_at)
        for role, look in looks.items():
            self.heard[role] = time.monotonic()
            self.available[role] = look.available
            self.lines += look.lines
            for line in look.lines:
                self._take(role, line)
        self._check_silence(errors)
        self._check_end(looks, errors)
        self._check_guards({role: look.killed_at for role, look in looks.items()})

    def _check_end(self, looks: Mapping[Role, _Look], errors: Mapping[Role, SparkserveError]) -> None:
        """Raise when a rank ended, or said that it will: with its Docker engine, it is told before who missed it."""
        ended = [role for role, look in looks.items() if not look.container.is_running]
        fatal = [line for look in looks.values() for line in look.lines if self._is_fatal(line)]
        if not ended and not fatal:
            return
        # One rank soon ends with the other: a second look sees both, their last words, and what a guard killed.
        again, lost = self.cluster.try_both(self._look_at)
        self.lines += [line for look in again.values() for line in look.lines]
        last = {**looks, **again}
        self._check_guards({role: look.killed_at for role, look in last.items()})
        if ended or any(error.code == "docker_unreachable" for error in lost.values()):
            raise self._rank_ended(last, {**errors, **lost})
        role = ROLES[fatal[0].rank]
        raise self.failure("engine_failed", f"rank {fatal[0].rank} cannot serve {self._where(role)}", role)

    def _is_fatal(self, line: LogLine) -> bool:
        failure = match_failure(line.text, self.recipe.failures)
        return failure is not None and failure.fatal

    def _look_at(self, node: Node) -> _Look:
        follower = self.followers[node.role]
        path = f"/containers/{follower.container}/json"
        raw = node.session.ask("facts", timeout=LOOK_SECONDS, docker=[path], files=["/proc/meminfo"])
        answer = raw["docker"][path]
        container = ContainerFacts(follower.container, "", state="removed")
        if answer.get("status") != 404:
            container = parse_container(docker_body(answer, node.role))
        # The log is read after the state, so that an ended container's last words are complete.
        lines = follower.read()
        available = parse_memory(raw["files"]["/proc/meminfo"] or "").available
        # The node watches its own memory, and tells at which MemAvailable it had to kill its rank.
        floor = int(self.recipe.memory.guard_gib * _GIB)
        guard = node.session.ask("guard", timeout=LOOK_SECONDS, container=follower.container, floor=floor)
        return _Look(container, lines, available, guard["killed_at"], raw["time"] - (container.finished_at or 0.0))

    def _check_guards(self, killed: Mapping[Role, int | None]) -> None:
        for role, available in killed.items():
            if available is not None:
                rank, floor = ROLES.index(role), self.recipe.memory.guard_gib
                left = f"{available / _GIB:.1f} GiB of memory were left, needed: {floor:g} GiB"
                message = f"rank {rank} was killed {self._where(role)}, before the machine hangs: {left}"
                error = self.failure("memory_floor", message, role)
                error.hint = f"close other programs on that node, or serve less (context, requests); {error.hint}"
                raise error

    def _take(self, role: Role, line: LogLine) -> None:
        if phase := match_phase(line.text, self.recipe.phases):
            self.phases[role] = phase
            self.launch.phases.setdefault(f"rank {line.rank}: {phase}", self.elapsed)
        failure = match_failure(line.text, self.recipe.failures)
        if failure and not failure.fatal and failure not in self.warnings:
            self.warnings.append(failure)

    def _ask_kernels(self) -> None:
        """Take what the kernels said since the wait began: what a driver warns of is in no container's log."""
        seconds = self.elapsed + _EARLIER_SECONDS
        for role, lines in self.cluster.try_both(lambda node: kernel_lines(node, seconds))[0].items():
            for text in lines:
                self._take(role, LogLine(0.0, ROLES.index(role), text))

    def _check_silence(self, errors: Mapping[Role, SparkserveError]) -> None:
        for role, error in errors.items():
            silent = time.monotonic() - self.heard[role]
            if error.code == "connection_lost" or silent > _SILENCE_SECONDS:
                raise self.failure("node_silent", f"the {role} could not be asked for {silent:.0f} s", role, error)

    def _rank_ended(self, looks: Mapping[Role, _Look], unseen: Mapping[Role, SparkserveError]) -> SparkserveError:
        """Name who ended first: before all others a rank that went with its Docker engine, which the other missed."""
        ended = {role: look.container for role, look in looks.items() if not look.container.is_running}
        for role, container in ended.items():
            self._take(role, LogLine(0.0, ROLES.index(role), container.ended))
        gone = [role for role, error in unseen.items() if error.code == "docker_unreachable" and role not in ended]
        role, *others = [*gone, *sorted(ended, key=lambda role: -looks[role].since_end)]
        what, how = ("was lost", unseen[role].message) if gone else ("ended", ended[role].ended)
        message = f"rank {ROLES.index(role)} {what} {self._where(role)}: {how}"
        message += "".join(f"; rank {ROLES.index(other)} ended too: {ended[other].ended}" for other in others)
        return self.failure("rank_ended", message, role, unseen[role] if gone else None)

    def _where(self, role: Role) -> str:
        phase = self.phases.get(role)
        return f"after {self.elapsed:.1f} s" + (f", in phase {phase!r}" if phase else ", before its first phase")

    def failure(self, code: str, message: str, role: str, cause: SparkserveError | None = None) -> SparkserveError:
        """Build the error of a failed start: the earliest real error, cause, advice, known warnings, last lines."""
        if code != "node_silent":
            self._ask_kernels()
        trouble = find_trouble(self.lines, self.recipe.failures)
        details = [cause.details or str(cause)] if cause else []
        hint = "`sparkserve logs --run last` shows both logs"
        if trouble:
            said = time.strftime("%H:%M:%S", time.localtime(trouble.line.moment))
            details.append(f"first error, rank {trouble.line.rank} at {said}: {trouble.line.text.strip()}")
        if trouble and trouble.known:
            details.append(f"cause: {trouble.known.cause}")
            hint = f"{trouble.known.advice}; {hint}"
        elif cause and cause.hint:
            hint = f"{cause.hint}; {hint}"
        details += [f"warning: {one.cause}: {one.advice}" for one in self.warnings]
        for rank, text in last_words(self.lines).items():
            details.append(f"last line of rank {rank}: {text}")
        exit_code = cause.exit_code if cause else 1
        return SparkserveError(code, message, hint, role, mask("\n".join(details), self.launch.secrets), exit_code)

    def check_deadline(self) -> None:
        """End a wait that is longer than the recipe allows."""
        limit = self.launch.deadline(self.recipe)
        if self.elapsed > limit:
            phases = ", ".join(
                f"rank {ROLES.index(role)}: {self.phases.get(role) or 'no phase seen'}" for role in ROLES
            )
            raise self.failure("start_timeout", f"no answer within {limit} s ({phases})", "head")

    def line_of_state(self, probing: str) -> str:
        """Say in one line how far both ranks are."""
        ranks = [f"rank {ROLES.index(role)}: {self.phases.get(role) or 'starting'}" for role in ROLES]
        available = " / ".join(f"{self.available.get(role, 0) / _GIB:.1f}" for role in ROLES)
        state = f"{'; '.join(ranks)}; {probing}; {available} GiB available; {self.elapsed:.0f} s"
        last = next((line for line in reversed(self.lines) if line.text.strip()), None)
        text = mask(last.text.strip(), self.launch.secrets)[:_SHOWN] if last else ""
        return f"{state}{ASIDE}rank {last.rank} says: {text}" if last else state


def is_half_started(report: ApplyReport) -> bool:
    """Whether a run ended after a rank was created and before the pair answered."""
    done = {item.change.resource for item in report.applied if item.change.step == STEP}
    return bool(done - {OLD_PAIR}) and READY not in done


def wait_until_ready(cluster: Cluster, recipe: Recipe, launch: Launch, work: Work) -> str:
    """Wait until the advertised address answers a real completion; whatever else happens, both ranks are ended."""
    watch = _Watch(cluster, recipe, launch)
    prober = Prober(launch.endpoint, recipe)
    with contextlib.closing(prober), all_or_nothing(cluster, launch.runs_dir, launch.secrets):
        watch.find_containers()
        prober.start()
        while not prober.answered:
            work.check()
            watch.look()
            if isinstance(prober.error, SparkserveError):
                raise watch.failure(prober.error.code, prober.error.message, "head", prober.error)
            if prober.error:
                raise prober.error
            watch.check_deadline()
            work.note(watch.line_of_state(prober.state))
            prober.finished.wait(_POLL_SECONDS)
        watch.look()
    warned = "".join(f"; warning: {warning.cause}" for warning in watch.warnings)
    return f"answered through {launch.endpoint.model} at {launch.endpoint.base_url} after {watch.elapsed:.1f} s{warned}"
