"""How the pair is: a pure judgement over what was seen, and the look that sees it without disturbing a serving pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparkserve.cluster import ROLES, Role
from sparkserve.engine_facts import ContainerFacts, Facts
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_NOT_RUNNING

State = Literal["running", "starting", "stalled", "degraded", "stopped", "unknown"]
ProbeResult = Literal["not asked", "answered", "timeout", "loading", "failed"]


@dataclass(frozen=True)
class Sample:
    """The engine's counters at one moment, in seconds of the head's monotonic clock."""

    moment: float
    running: float
    waiting: float
    moving: Mapping[str, float]
    generated: float | None = None

    @property
    def in_flight(self) -> bool:
        """Whether requests run or wait."""
        return self.running + self.waiting > 0


@dataclass(frozen=True)
class Evidence:
    """What was seen beside the containers; `still_seconds` is how long no counter moved while requests were there."""

    http: Literal["open", "closed", "silent", "not asked"] = "not asked"
    samples: tuple[Sample, ...] = ()
    still_seconds: float = 0.0
    probe: ProbeResult = "not asked"
    problems: tuple[str, ...] = ()
    broken_lines: tuple[str, ...] = ()
    phases: Mapping[Role, str] = field(default_factory=dict)

    @property
    def in_flight(self) -> bool:
        """Whether requests ran or waited at the last look."""
        return bool(self.samples) and self.samples[-1].in_flight

    @property
    def moved(self) -> bool:
        """Whether a counter moved between the first and the last look."""
        return len(self.samples) > 1 and self.samples[0].moving != self.samples[-1].moving

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens generated between the looks; None where that was not counted."""
        if len(self.samples) < 2:
            return None
        first, last = self.samples[0], self.samples[-1]
        if first.generated is None or last.generated is None or last.moment <= first.moment:
            return None
        return max(last.generated - first.generated, 0.0) / (last.moment - first.moment)


@dataclass(frozen=True)
class Expected:
    """What a good pair looks like; a digest that is not known is not compared.

    `answered` tells whether these containers have answered already, `start_seconds` how long they may take until then.
    """

    digests: Mapping[Role, str] = field(default_factory=dict)
    recipe: str = ""
    stalled_seconds: float = 120.0
    start_seconds: float = 3600.0
    answered: bool = False


@dataclass(frozen=True)
class Verdict:
    """The state, and why."""

    state: State
    reasons: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Exit code of `sparkserve status`."""
        return {"running": 0, "unknown": EXIT_COULD_NOT_LOOK}.get(self.state, EXIT_NOT_RUNNING)


def judge(facts: Mapping[Role, Facts], unseen: Mapping[Role, str], evidence: Evidence, expected: Expected) -> Verdict:
    """Judge the pair: first whether both nodes were seen, then both containers, then whether the engine answers."""
    if unseen:
        known = [f"{role}: {_contents(facts[role])}" for role in ROLES if role in facts]
        return Verdict("unknown", (*(f"{role} could not be asked: {why}" for role, why in unseen.items()), *known))
    containers = [container for role in ROLES for container in facts[role].containers]
    if not any(container.is_running for container in containers):
        ended = [f"{container.name}: {container.describe()}" for container in containers]
        return Verdict("stopped", tuple(ended) or ("no container of ours is on either node",))
    missing = [*find_missing(facts, expected), *evidence.broken_lines]
    if missing:
        return Verdict("degraded", tuple(missing))
    return _judge_answers(evidence, expected, uptime(facts) or 0.0)


def _contents(facts: Facts) -> str:
    return ", ".join(f"{one.name} {one.describe()}" for one in facts.containers) or "nothing of ours"


def find_missing(facts: Mapping[Role, Facts], expected: Expected) -> list[str]:
    """List what a pair of running, wanted, living containers lacks."""
    found: list[str] = []
    runs = set()
    for rank, role in enumerate(ROLES):
        ours = facts[role].containers
        running = [container for container in ours if container.is_running]
        if not running:
            found.append(f"rank {rank} on the {role}: " + (ours[0].describe() if ours else "no container"))
        for container in running:
            runs.add(container.run)
            found += _lacks(container, rank, role, expected)
        if len(running) > 1:
            found.append(f"{len(running)} containers of ours run on the {role}")
    if len(runs) > 1:
        found.append(f"the ranks are of different runs: {', '.join(sorted(runs))}")
    return found


def _lacks(container: ContainerFacts, rank: int, role: Role, expected: Expected) -> list[str]:
    where = f"rank {rank} on the {role}"
    wanted = expected.digests.get(role)
    lacks = [] if container.rank == rank else [f"the {role} runs rank {container.rank}, not rank {rank}"]
    lacks += [] if container.is_alive else [f"{where}: {container.describe()}"]
    if wanted and expected.recipe not in ("", container.recipe):
        lacks.append(f"{where} serves recipe {container.recipe or 'unknown'}, not {expected.recipe}")
    elif wanted and container.spec != wanted:
        lacks.append(f"{where} runs another spec ({container.spec[7:19]}) than wanted ({wanted[7:19]})")
    return lacks


def uptime(facts: Mapping[Role, Facts]) -> float | None:
    """Seconds since rank 0 was started, by the head's clock."""
    head = facts["head"].of_rank(0) if "head" in facts else None
    if head is None or not head.is_running or head.started_at is None:
        return None
    return facts["head"].time - head.started_at


def _judge_answers(evidence: Evidence, expected: Expected, up_seconds: float) -> Verdict:
    if evidence.http == "closed" or evidence.probe == "loading":
        return _judge_loading(evidence, expected, up_seconds)
    if evidence.http == "silent":
        return Verdict("stalled", ("HTTP is open and gives no answer", *evidence.problems))
    if evidence.probe == "timeout":
        return _judge_no_token(evidence)
    if evidence.probe == "not asked" and evidence.in_flight:
        return _judge_busy(evidence, expected)
    if evidence.probe == "failed" or evidence.problems:
        return Verdict("degraded", evidence.problems)
    how = "a one-token completion was answered" if evidence.probe == "answered" else "HTTP answers"
    return Verdict("running", (f"idle; {how}",))


def _judge_loading(evidence: Evidence, expected: Expected, up_seconds: float) -> Verdict:
    phases = tuple(f"rank {ROLES.index(role)}: {phase}" for role, phase in evidence.phases.items() if phase)
    if expected.answered:
        how = "HTTP is closed" if evidence.http == "closed" else "it answers that it loads"
        return Verdict("degraded", (f"{how}, though it has served already", *phases))
    if up_seconds > expected.start_seconds:
        late = f"no answer {up_seconds:.0f} s after the start, more than {expected.start_seconds:.0f} s"
        return Verdict("degraded", (late, *phases))
    return Verdict("starting", phases or ("the engine has not said how far it is",))


def _judge_no_token(evidence: Evidence) -> Verdict:
    if not evidence.samples:
        return Verdict("unknown", (*evidence.problems, "it may be busy: there are no counters that would tell"))
    return Verdict("stalled", ("no request was in flight, and yet no token came", *evidence.problems))


def _judge_busy(evidence: Evidence, expected: Expected) -> Verdict:
    last = evidence.samples[-1]
    requests = f"{last.running:.0f} running, {last.waiting:.0f} waiting"
    if evidence.moved:
        if evidence.problems:
            return Verdict("degraded", (f"busy ({requests})", *evidence.problems))
        return Verdict("running", (f"busy ({requests}); the counters move",))
    still = f"{requests}, and no counter moved for {evidence.still_seconds:.0f} s"
    if evidence.still_seconds >= expected.stalled_seconds:
        return Verdict("stalled", (still, *evidence.problems))
    reason = f"busy ({still}; it counts as stalled from {expected.stalled_seconds:.0f} s on)"
    return Verdict("running", (reason, *evidence.problems))
