"""What runs of ours on a node, and what stands in its place: read-only, through the node program."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sparkserve.cluster import Node
from sparkserve.container import RANK_LABEL, RECIPE_LABEL, RUN_LABEL, SPEC_LABEL, container_name, is_ours
from sparkserve.errors import EXIT_COULD_NOT_LOOK, docker_unreachable
from sparkserve.system_text import parse_meminfo

LOOK_SECONDS = 5.0
_NAMES = (container_name(0), container_name(1))
_INIT = re.compile(r"\S*(docker-init|tini)\b")
_KERNEL_COMMANDS = {
    "journal": ["journalctl", "-k", "--no-pager", "-q", "-n", "20000", "-o", "short-iso"],
    "dmesg": ["dmesg", "--time-format", "iso"],
}
_TOP = "/containers/{id}/top?ps_args=-eo%20pid,stat,args"


@dataclass(frozen=True)
class Process:
    """A process inside a container, with ps's state letters."""

    pid: int
    state: str
    command: str

    @property
    def works(self) -> bool:
        """Whether it can do anything: neither ended nor stopped by a signal."""
        return self.state[:1] not in ("Z", "X", "T", "t")


@dataclass(frozen=True)
class ContainerFacts:
    """One container; moments are seconds of the node's clock, None where it did not happen."""

    id: str
    name: str
    state: str
    rank: int | None = None
    run: str = ""
    spec: str = ""
    recipe: str = ""
    image: str = ""
    image_id: str = ""
    started_at: float | None = None
    finished_at: float | None = None
    exit_code: int = 0
    oom_killed: bool = False
    stop_seconds: int = 10
    stop_signal: str = "SIGTERM"
    processes: tuple[Process, ...] = ()

    @property
    def is_running(self) -> bool:
        """Whether Docker counts it as running."""
        return self.state == "running"

    @property
    def is_alive(self) -> bool:
        """Whether an engine process works in it, beside the init, and none was stopped: the others wait for it."""
        engine = [process for process in self.processes if not _INIT.match(process.command)]
        return self.is_running and any(process.works for process in engine) and not self.stopped

    @property
    def stopped(self) -> tuple[Process, ...]:
        """The processes that a signal stopped; what a debugger holds goes on by itself."""
        return tuple(process for process in self.processes if process.state[:1] == "T")

    @property
    def hangs(self) -> bool:
        """Whether its processes were seen and the engine's cannot work: no signal in order will end it."""
        return self.is_running and bool(self.processes) and not self.is_alive

    @property
    def ended(self) -> str:
        """How it ended, in a few words."""
        if self.state == "removed":
            return "its container was removed"
        if self.oom_killed:
            return f"killed by the kernel for memory, exit code {self.exit_code}"
        return f"exit code {self.exit_code}" + (" (killed)" if self.exit_code == 137 else "")

    def describe(self) -> str:
        """Say what it is doing, in a few words."""
        if self.is_running and self.stopped:
            first = self.stopped[0]
            return f"running, but a signal stopped its process {first.pid} ({first.command.partition(' ')[0]})"
        if self.is_running:
            return "running" if self.is_alive else "running without a working engine process"
        return f"exited ({self.ended})" if self.state == "exited" else self.state


@dataclass(frozen=True)
class Memory:
    """Memory of a node, in bytes."""

    total: int
    available: int
    swap_used: int


@dataclass(frozen=True)
class Facts:
    """A node's containers that are ours (by label) and others that hold our names; `time` is the node's clock."""

    time: float
    memory: Memory
    containers: tuple[ContainerFacts, ...] = ()
    foreign: tuple[ContainerFacts, ...] = ()
    kernel: str = ""

    def of_rank(self, rank: int) -> ContainerFacts | None:
        """Find the container of a rank; a running one before a leftover."""
        found = [container for container in self.containers if container.rank == rank]
        return min(found, key=lambda container: not container.is_running, default=None)


def gather(node: Node) -> Facts:
    """Look at a node's containers, the processes in ours, and its memory."""
    raw, rows = list_containers(node, "?all=1")
    ours = [row for row in rows if is_ours(row.get("Labels"))]
    foreign = [row for row in rows if row not in ours and _name(row["Names"][0]) in _NAMES]
    return Facts(
        time=raw["time"],
        memory=parse_memory(raw["files"]["/proc/meminfo"] or ""),
        containers=tuple(parse_container(body, processes) for body, processes in inspect(node, ours)),
        foreign=tuple(
            ContainerFacts(row["Id"], _name(row["Names"][0]), row["State"], image=row["Image"]) for row in foreign
        ),
        kernel=raw.get("kernel", ""),
    )


def list_containers(node: Node, query: str = "") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Give a node's facts of this moment with its memory, and Docker's rows of its containers."""
    listing = f"/containers/json{query}"
    raw = node.session.ask("facts", timeout=LOOK_SECONDS, docker=[listing], files=["/proc/meminfo"])
    return raw, docker_body(raw["docker"][listing], node.role)


def inspect(node: Node, rows: Sequence[Mapping[str, Any]], *, images: bool = False) -> Iterator[tuple[Any, ...]]:
    """Give Docker's description of each container, its processes, and with `images` the description of its image."""
    pages = [
        [
            f"/containers/{row['Id']}/json",
            _TOP.format(id=row["Id"]),
            *([f"/images/{row['ImageID']}/json"] if images else []),
        ]
        for row in rows
    ]
    asked = [page for own in pages for page in own]
    answers = node.session.ask("facts", timeout=LOOK_SECONDS, docker=asked)["docker"] if asked else {}
    for container, top, *others in pages:
        if answers[container].get("status") != 404:  # it went away between the two looks
            processes = parse_top(answers[top]["body"]) if answers[top].get("status") == 200 else ()
            bodies = [docker_body(answers[page], node.role) for page in (container, *others)]
            yield bodies[0], processes, *bodies[1:]


def kernel_lines(node: Node, seconds: float | None = None) -> list[str]:
    """Give the kernel's lines that this account may read, of the last seconds only where so many are given."""
    raw = node.session.ask("facts", timeout=LOOK_SECONDS if seconds else 30, commands=_KERNEL_COMMANDS)
    outputs = (raw["commands"][name] for name in _KERNEL_COMMANDS)
    lines: list[str] = next((one["out"].splitlines() for one in outputs if one and one["code"] == 0 and one["out"]), [])
    if seconds is None:
        return lines
    return [line for line in lines if _kernel_moment(line) >= raw["time"] - seconds]


def _kernel_moment(line: str) -> float:
    try:
        return datetime.fromisoformat(line.split(maxsplit=1)[0]).timestamp()
    except (ValueError, IndexError):
        return 0.0


def docker_body(answer: Mapping[str, Any], node: str, exit_code: int = EXIT_COULD_NOT_LOOK) -> Any:  # noqa: ANN401 - JSON
    """Take the body of a Docker answer; anything but 200 is an error: "could not look" is never "none"."""
    if answer.get("status") == 200:
        return answer["body"]
    raise docker_unreachable(answer, node, exit_code)


def parse_container(body: Mapping[str, Any], processes: tuple[Process, ...] = ()) -> ContainerFacts:
    """Read Docker's description of a container."""
    state, config = body["State"], body["Config"]
    labels = config.get("Labels") or {}
    rank = labels.get(RANK_LABEL, "")
    return ContainerFacts(
        id=body["Id"],
        name=_name(body["Name"]),
        state=state["Status"],
        rank=int(rank) if rank.isdigit() else None,
        run=labels.get(RUN_LABEL, ""),
        spec=labels.get(SPEC_LABEL, ""),
        recipe=labels.get(RECIPE_LABEL, ""),
        image=config.get("Image", ""),
        image_id=body.get("Image", ""),
        started_at=parse_moment(state.get("StartedAt", "")),
        finished_at=parse_moment(state.get("FinishedAt", "")),
        exit_code=state.get("ExitCode", 0),
        oom_killed=bool(state.get("OOMKilled")),
        stop_seconds=config.get("StopTimeout") or 10,
        stop_signal=config.get("StopSignal") or "SIGTERM",
        processes=processes,
    )


def parse_top(body: Mapping[str, Any]) -> tuple[Process, ...]:
    """Read the processes of a container."""
    return tuple(Process(int(row[0]), row[1], " ".join(row[2:])) for row in body.get("Processes") or ())


def parse_moment(text: str) -> float | None:
    """Read Docker's UTC time with up to nine digits of a second; None for its year 1, which means never."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)", text)
    if match is None or text.startswith("0001"):
        return None
    zone = "+00:00" if match[3] == "Z" else match[3]
    return datetime.fromisoformat(match[1] + zone).astimezone(UTC).timestamp() + float(match[2] or 0)


def parse_memory(text: str) -> Memory:
    """Read /proc/meminfo."""
    found = parse_meminfo(text)
    swap_used = found.get("SwapTotal", 0) - found.get("SwapFree", 0)
    return Memory(found.get("MemTotal", 0), found.get("MemAvailable", 0), swap_used)


def _name(text: str) -> str:
    return text.removeprefix("/")
