"""The logs of both ranks: followed while they grow, put in one order, kept after the containers are gone."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from sparkserve.cluster import Cluster, Node, Role
from sparkserve.engine_facts import LOOK_SECONDS, ContainerFacts, docker_body, gather, parse_moment
from sparkserve.errors import EXIT_NOT_RUNNING, EXIT_USAGE, Failures, SparkserveError
from sparkserve.hosts import mask
from sparkserve.recipe import KnownFailure, Phase

_RUNS_KEPT = 20
_SAVED_LINE = re.compile(r"(\d{4}-\S+Z) (.*)")
# What an error looks like in the words of Python, NCCL, CUDA and the kernel, for lines that no recipe knows.
_ERROR = re.compile(
    r"Traceback \(most recent call last\)|\b\w+(Error|Exception)\b|\bNCCL error|\b[Oo]ut of memory\b|\bCUDA error"
    r"|\bFATAL\b|\bERROR\b|\berror:|No space left on device|Cannot allocate memory|Permission denied"
)
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class LogLine:
    """One line of a rank; `moment` is in seconds of the head's clock, `stamp` what the node wrote."""

    moment: float
    rank: int
    text: str
    stamp: str = ""


@dataclass
class LogFollower:
    """Reads what a container said since the last look; nothing twice, nothing left out."""

    node: Node
    container: str
    rank: int
    since: float = 0.0
    tail: int = 0
    gone: bool = False
    _seen: set[tuple[str, str]] = field(default_factory=set)

    def read(self) -> list[LogLine]:
        """Give the new lines, oldest first."""
        lines: list[LogLine] = []
        more = True
        while more:
            asked = time.time()
            answer = self.node.session.ask(
                "docker_logs",
                timeout=LOOK_SECONDS,
                container=self.container,
                # Both streams are stamped before they are written: a line may appear behind a slightly later one.
                since=f"{self.since - 1.0:.6f}" if self.since else "",
                tail=str(self.tail) if self.tail and not self._seen else "",
            )
            if answer.get("status") == 404:
                self.gone = True
                return lines
            if answer.get("status") != 200:
                docker_body(answer, self.node.role)
            offset = answer["time"] - (asked + time.time()) / 2
            lines += self._take(answer["lines"], offset)
            more = bool(answer["more"])
        return lines

    def _take(self, rows: Iterable[list[str]], offset: float) -> list[LogLine]:
        fresh = [(stamp, text) for stamp, text in rows if (stamp, text) not in self._seen]
        moments = {stamp: parse_moment(stamp) or 0.0 for stamp, _ in fresh}
        self.since = max([self.since, *moments.values()])
        self._seen |= set(fresh)
        if len(self._seen) > 20_000:
            self._seen = {row for row in self._seen if (parse_moment(row[0]) or 0.0) >= self.since - 1.0}
        return [LogLine(moments[stamp] - offset, self.rank, text, stamp) for stamp, text in fresh]


@dataclass(frozen=True)
class LogQuery:
    """Which lines are wanted; `since` in seconds before now, `tail` in lines of each rank."""

    rank: int | None = None
    since: float | None = None
    tail: int | None = None
    grep: str = ""
    follow: bool = False
    secrets: tuple[SecretStr | None, ...] = ()

    def wants(self, line: LogLine) -> bool:
        """Whether a line is asked for."""
        return not self.grep or re.search(self.grep, line.text) is not None


def read_logs(cluster: Cluster, query: LogQuery) -> Iterator[LogLine]:
    """Give the lines of both ranks in the order of time; a node that cannot be asked is told after that.

    Whoever follows stays with the pair when it is made anew.
    """
    _check_pattern(query.grep)
    followers: dict[str, LogFollower] = {}
    errors = _find_ranks(cluster, query, followers)
    if not errors and not followers:
        message = "no container of ours is there" + (f" for rank {query.rank}" if query.rank is not None else "")
        raise SparkserveError("not_running", message, "`sparkserve start`", exit_code=EXIT_NOT_RUNNING)
    while True:
        batches, lost = cluster.try_both(
            lambda node: [line for one in followers.values() if one.node is node for line in one.read()]
        )
        errors |= lost
        for line in sorted((line for batch in batches.values() for line in batch), key=lambda line: line.moment):
            if query.wants(line):
                yield LogLine(line.moment, line.rank, mask(line.text, query.secrets), line.stamp)
        if errors:
            raise Failures(list(errors.values()))
        if not query.follow:
            return
        time.sleep(0.3)
        for id_ in [id_ for id_, one in followers.items() if one.gone]:
            del followers[id_]
        if len(followers) < (2 if query.rank is None else 1):
            errors = _find_ranks(cluster, query, followers)


def _find_ranks(cluster: Cluster, query: LogQuery, followers: dict[str, LogFollower]) -> dict[Role, SparkserveError]:
    """Follow each wanted rank that is not followed yet, by its container."""
    facts, errors = cluster.try_both(gather)
    for role, seen in facts.items():
        since = seen.time - query.since + 1.0 if query.since is not None else 0.0
        for found in seen.containers:
            if query.rank in (None, found.rank) and found.id not in followers:
                tail, rank = query.tail or 0, found.rank or 0
                followers[found.id] = LogFollower(cluster.node(role), found.id, rank, since=since, tail=tail)
    return errors


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        message = f"{pattern!r} is no regular expression: {error}"
        hint = "a plain word is one too; put a backslash before . * + ? ( ) [ ] to mean the character"
        raise SparkserveError("pattern_invalid", message, hint, exit_code=EXIT_USAGE) from error


# -- kept logs --------------------------------------------------------------------------------------------------------


def save_log(node: Node, container: ContainerFacts, runs_dir: Path, secrets: tuple[SecretStr | None, ...]) -> Path:
    """Keep a container's whole log below the state directory, secrets masked; older runs are dropped."""
    directory = runs_dir / (container.run or "unknown")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"rank{container.rank or 0}.log"
    lines = LogFollower(node, container.id, container.rank or 0).read()
    beside = path.with_suffix(".new")
    beside.write_text("".join(f"{line.stamp} {mask(line.text, secrets)}\n" for line in lines), encoding="utf-8")
    beside.chmod(0o600)
    beside.replace(path)
    _drop_old_runs(runs_dir)
    return path


def _drop_old_runs(runs_dir: Path) -> None:
    for directory in saved_runs(runs_dir)[_RUNS_KEPT:]:
        for path in (runs_dir / directory).glob("rank[01].log"):
            path.unlink()


def saved_runs(runs_dir: Path) -> list[str]:
    """List the runs whose logs were kept, newest first; a run's name begins with its time."""
    return sorted({path.parent.name for path in runs_dir.glob("*/rank[01].log")}, reverse=True)


def read_saved(runs_dir: Path, run: str, query: LogQuery) -> list[LogLine]:
    """Read the kept logs of a run, both ranks in the order of time."""
    _check_pattern(query.grep)
    run = next(iter(saved_runs(runs_dir)), run) if run == "last" else run
    if run not in saved_runs(runs_dir):
        known = ", ".join(saved_runs(runs_dir)[:5]) or "none"
        message = f"no logs of run {run}; kept: {known}"
        raise SparkserveError("run_unknown", message, "`sparkserve history` lists all starts", exit_code=EXIT_USAGE)
    lines = []
    for rank in (0, 1) if query.rank is None else (query.rank,):
        path = runs_dir / run / f"rank{rank}.log"
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            if match := _SAVED_LINE.fullmatch(text):
                lines.append(LogLine(parse_moment(match[1]) or 0.0, rank, match[2], match[1]))
    return sorted((line for line in lines if query.wants(line)), key=lambda line: line.moment)


# -- what went wrong --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trouble:
    """The line that tells what went wrong, and what the recipe knows about it."""

    line: LogLine
    known: KnownFailure | None = None


def find_trouble(lines: Iterable[LogLine], failures: Iterable[KnownFailure]) -> Trouble | None:
    """Find the earliest real error of both ranks.

    A line that the recipe knows says more than an unknown one of the same rank; but an unknown one that came before it
    is the cause where it is of the other rank, or where the known one only tells that serving is over ("my peer is
    gone", "the engine is dead"): that is an echo.
    """
    ordered = sorted(lines, key=lambda line: line.moment)
    known, unknown = _first_known(ordered, tuple(failures)), _first_unknown(ordered, tuple(failures))
    if known is None or unknown is None:
        return known or unknown
    may_echo = unknown.line.rank != known.line.rank or (known.known is not None and known.known.serving)
    return unknown if may_echo and unknown.line.moment < known.line.moment else known


def _first_known(ordered: list[LogLine], failures: tuple[KnownFailure, ...]) -> Trouble | None:
    matches = ((line, match_failure(line.text, failures)) for line in ordered)
    return next((Trouble(line, failure) for line, failure in matches if failure and failure.fatal), None)


def _first_unknown(ordered: list[LogLine], failures: tuple[KnownFailure, ...]) -> Trouble | None:
    for index, line in enumerate(ordered):
        if _ERROR.search(line.text) and match_failure(line.text, failures) is None:
            return Trouble(_end_of_traceback([one for one in ordered[index:] if one.rank == line.rank]))
    return None


def match_failure(text: str, failures: Iterable[KnownFailure]) -> KnownFailure | None:
    """Find what the recipe knows about a line."""
    return next((failure for failure in failures if re.search(failure.pattern, text)), None)


def match_phase(text: str, phases: Iterable[Phase]) -> str:
    """Say how far a load is, by one line of it: the phase's name and n/N where it counts; or nothing."""
    for phase in phases:
        if match := re.search(phase.pattern, text):
            groups = match.groupdict()
            count = "/".join(found for name in ("done", "total") if (found := groups.get(name)))
            return f"{phase.name} {count}".strip()
    return ""


def _end_of_traceback(lines: list[LogLine]) -> LogLine:
    """Give the line that names the error, where the first or second of these begins a traceback: the one below it."""
    for index, line in enumerate(lines[:2]):
        before, found, _ = line.text.partition(_TRACEBACK)
        if found:  # each of its lines may have the same process and time in front
            rest = [one for one in lines[index + 1 :] if one.text.startswith(before)]
            texts = [(one, one.text[len(before) :]) for one in rest]
            return next((one for one, text in texts if text.strip() and not text.startswith((" ", "\t"))), lines[0])
    return lines[0]


def last_words(lines: Iterable[LogLine]) -> dict[int, str]:
    """Give the last line of each rank."""
    return {line.rank: text for line in lines if (text := line.text.strip())}
