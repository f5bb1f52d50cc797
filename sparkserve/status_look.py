"""Collecting the evidence for a status: containers and logs of both nodes, then counters, and only when idle a token.

One status is short, and a stall is long: requests that run while no counter moves may be a slow step of a huge prompt.
So the moment since which nothing moved is remembered in a small file between looks; a look that finds the same
container with the same counters and requests in flight counts from there. Any movement, or an idle look, clears it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparkserve import state_file
from sparkserve.cluster import Cluster, Node, Role
from sparkserve.endpoint import Endpoint
from sparkserve.engine_facts import ContainerFacts, Facts, gather
from sparkserve.engine_logs import LogFollower, LogLine, match_failure, match_phase
from sparkserve.errors import SparkserveError
from sparkserve.recipe import Counters, Recipe
from sparkserve.records import read_records
from sparkserve.replies import EndpointError
from sparkserve.status import Evidence, Expected, Sample, Verdict, find_missing, judge

_TAIL = 200
_APART_SECONDS = 0.7
_PROBE_SECONDS = 5.0
# Who waited for minutes can look a little longer than one step of a huge prompt takes.
_BUSY_SECONDS = 30.0


@dataclass(frozen=True)
class Question:
    """What to look at; `patience` is how long one look waits for a counter to move, in seconds.

    Without `ask_token` an idle engine is not asked for one: whoever looks every second asks now and then only. Who must
    not write anything does not remember what moved either.
    """

    cluster: Cluster
    recipe: Recipe
    endpoint: Endpoint
    state: Path
    wanted: Mapping[Role, str] = field(default_factory=dict)
    patience: float = 6.0
    ask_token: bool = True
    remembers: bool = True

    @property
    def movement_file(self) -> Path:
        """Since when nothing moves."""
        return self.state / "movement.json"

    def expected(self, head: ContainerFacts | None) -> Expected:
        """Say what a good pair looks like, by the recipe and by the record of its start."""
        counters, readiness = self.recipe.counters, self.recipe.readiness
        stalled = counters.stalled_seconds if counters else 120
        record = next(iter(read_records(self.state / "runs", head.run)), None) if head and head.run else None
        # The record of a pair that was brought back, or started by hand, tells of an earlier life.
        answered_at = record.begun + record.seconds if record and record.ending == "answered" else 0.0
        answered = head is not None and answered_at >= (head.started_at or 0.0) > 0
        is_later = record is not None and not record.pair.get("first_start", True)
        seconds = readiness.later_seconds if is_later else readiness.first_seconds
        return Expected(self.wanted, self.recipe.name, stalled, seconds, answered)


@dataclass(frozen=True)
class Status:
    """The verdict and what it was made from."""

    verdict: Verdict
    facts: Mapping[Role, Facts]
    unseen: Mapping[Role, SparkserveError]
    evidence: Evidence


def look(question: Question) -> Status:
    """Look at the pair once."""
    facts, unseen = question.cluster.try_both(gather)
    lines, lost = question.cluster.try_both(lambda node: _last_lines(node, facts.get(node.role)))
    unseen = {**lost, **unseen}
    evidence = _read_logs(lines, question.recipe)
    runs = any(container.is_running for seen in facts.values() for container in seen.containers)
    head = facts["head"].of_rank(0) if "head" in facts else None
    expected = question.expected(head)
    if runs and not unseen and not find_missing(facts, expected) and not evidence.broken_lines:
        evidence = _ask_engine(question, evidence, head.id if head else "")
    told = {role: error.message for role, error in unseen.items()}
    return Status(judge(facts, told, evidence, expected), facts, unseen, evidence)


def _last_lines(node: Node, facts: Facts | None) -> list[LogLine]:
    running = [container for container in facts.containers if container.is_running] if facts else []
    return [line for one in running for line in LogFollower(node, one.id, one.rank or 0, tail=_TAIL).read()]


def _read_logs(lines: Mapping[Role, list[LogLine]], recipe: Recipe) -> Evidence:
    broken: dict[str, str] = {}
    phases: dict[Role, str] = {}
    for role, own in lines.items():
        for line in own:
            phases[role] = match_phase(line.text, recipe.phases) or phases.get(role, "")
            failure = match_failure(line.text, recipe.failures)
            if failure and failure.serving:
                broken[failure.cause] = f"{failure.cause} (rank {line.rank}: {line.text.strip()}); {failure.advice}"
    return Evidence(broken_lines=tuple(broken.values()), phases=phases)


# -- the engine -------------------------------------------------------------------------------------------------------


def _ask_engine(question: Question, evidence: Evidence, container: str) -> Evidence:
    endpoint, health = question.endpoint, question.recipe.readiness.health
    try:
        status = endpoint.health(health)
    except EndpointError as error:
        if error.code == "endpoint_closed":
            return replace(evidence, http="closed")
        return replace(evidence, http="silent", problems=(error.message,))
    problems = () if status == 200 else (f"{health} answers HTTP {status}",)
    evidence = replace(evidence, http="open", problems=problems)
    counters = question.recipe.counters
    try:
        samples = _sample(endpoint, counters, question.patience) if counters else ()
    except EndpointError as error:
        if error.status in (401, 403):
            return replace(evidence, probe="failed", problems=(f"{error.message}: another API key than ours",))
        # Without counters a token is the only proof that is left.
        return _probe(question, replace(evidence, problems=(*problems, f"no counters: {error.message}")))
    evidence = replace(evidence, samples=samples)
    if evidence.in_flight and not evidence.moved:
        return replace(evidence, still_seconds=_remember(question, container, samples))
    if question.remembers:
        with contextlib.suppress(OSError):
            question.movement_file.unlink(missing_ok=True)
    return evidence if evidence.in_flight else _probe(question, evidence)


def _sample(endpoint: Endpoint, counters: Counters, patience: float) -> tuple[Sample, ...]:
    """Look at the counters; where requests are in flight, again until one moved or patience ends."""
    samples = [_read_counters(endpoint, counters)]
    begun = samples[0].moment
    while samples[-1].in_flight:
        time.sleep(0.25)
        samples.append(_read_counters(endpoint, counters))
        moved = samples[-1].moving != samples[0].moving
        passed = samples[-1].moment - begun
        if passed >= patience or (moved and passed >= _APART_SECONDS):
            break
    return samples[0], samples[-1]


def is_busy(endpoint: Endpoint, counters: Counters | None, patience: float = _BUSY_SECONDS) -> bool:
    """Whether requests are in flight and a counter moves: the proof of an engine that leaves others waiting."""
    try:
        evidence = Evidence(samples=_sample(endpoint, counters, patience) if counters else ())
    except EndpointError:
        return False
    return evidence.in_flight and evidence.moved


def _read_counters(endpoint: Endpoint, counters: Counters) -> Sample:
    found = endpoint.metrics(counters.path)
    if counters.running not in found or not any(name in found for name in counters.moving):
        message = f"{counters.path} has no {counters.running}, or none of {', '.join(counters.moving)}"
        raise EndpointError("endpoint_garbled", message, "look at [counters] of the recipe", "head")
    return Sample(
        moment=time.monotonic(),
        running=found[counters.running],
        waiting=found.get(counters.waiting, 0.0),
        moving={name: found.get(name, 0.0) for name in counters.moving},
        generated=found.get(counters.generated),
    )


def _probe(question: Question, evidence: Evidence) -> Evidence:
    """Ask an idle engine for one token; when that takes too long, look whether others keep it busy by now."""
    if not question.ask_token:
        return evidence
    try:
        question.endpoint.one_token(_PROBE_SECONDS)
    except EndpointError as error:
        problems = (*evidence.problems, error.told)
        if error.status == 503:
            return replace(evidence, probe="loading", problems=problems)
        if error.code != "endpoint_timeout":
            return replace(evidence, probe="failed", problems=problems)
        return _look_again(question, replace(evidence, probe="timeout", problems=problems))
    return replace(evidence, probe="answered")


def _look_again(question: Question, evidence: Evidence) -> Evidence:
    counters = question.recipe.counters
    if not counters or not evidence.samples:
        return evidence
    try:
        now = _read_counters(question.endpoint, counters)
    except EndpointError as error:
        return replace(evidence, problems=(*evidence.problems, error.message))
    if now.in_flight and now.moving != evidence.samples[0].moving:
        return replace(evidence, samples=(evidence.samples[0], now), probe="not asked", problems=evidence.problems[:-1])
    return evidence


def _remember(question: Question, container: str, samples: tuple[Sample, ...]) -> float:
    """Give for how many seconds this container's counters have not moved with requests in flight."""
    now, moving = time.time(), dict(samples[-1].moving)
    here = samples[-1].moment - samples[0].moment
    known = state_file.read(question.movement_file)
    if known.get("container") == container and known.get("moving") == moving:
        return max(now - float(known["since"]), here)
    if question.remembers:
        with contextlib.suppress(OSError):  # on a full disk each look counts for itself
            state_file.write(question.movement_file, {"container": container, "moving": moving, "since": now - here})
    return here
