"""A strict node program that answers as a Docker engine with scripted containers would, and a strict Docker client."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import docker.errors

from sparkserve.container import OWNER_LABEL, RANK_LABEL, READER_LABEL, RUN_LABEL, SPEC_LABEL
from tests.fakes import FakeSession, Unscripted


def stamp(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f") + "000Z"


@dataclass
class Container:
    """One scripted container of a node; `log` holds (seconds, text)."""

    name: str
    labels: dict[str, str]
    id: str = ""
    state: str = "running"
    exit_code: int = 0
    oom_killed: bool = False
    started: float = field(default_factory=time.time)
    finished: float = 0.0
    log: list[tuple[float, str]] = field(default_factory=list)
    processes: list[list[str]] = field(
        default_factory=lambda: [["1", "Ss", "/sbin/docker-init"], ["7", "Sl", "engine"]]
    )
    ignores_sigterm: bool = False

    def __post_init__(self) -> None:
        self.id = self.id or f"id-{self.name}-{len(self.labels)}"

    def say(self, text: str, ago: float = 0.0) -> None:
        self.log.append((time.time() - ago, text))

    def end(self, code: int, *, oom_killed: bool = False) -> None:
        self.state, self.exit_code, self.oom_killed, self.finished = "exited", code, oom_killed, time.time()

    def inspected(self) -> dict[str, Any]:
        state = {
            "Status": self.state,
            "ExitCode": self.exit_code,
            "OOMKilled": self.oom_killed,
            "StartedAt": stamp(self.started),
            "FinishedAt": stamp(self.finished) if self.finished else "0001-01-01T00:00:00Z",
        }
        config = {"Labels": self.labels, "Image": "image", "StopTimeout": 1}
        image = f"sha256:image-of-{self.name}"
        return {"Id": self.id, "Name": f"/{self.name}", "Image": image, "State": state, "Config": config}


def ours(rank: int, run: str = "run-1", spec: str = "", **more: Any) -> Container:
    labels = {OWNER_LABEL: "sparkserve", RANK_LABEL: str(rank), RUN_LABEL: run, SPEC_LABEL: spec or f"sha256:{rank}"}
    return Container(f"sparkserve-rank{rank}", labels, **more)


class DockerNode:
    """One node's containers, seen through the node program and changed through docker-py's low-level calls."""

    def __init__(self, *containers: Container) -> None:
        self.containers = list(containers)
        self.events: list[str] = []
        self.available_kb = 121_000_000
        self.guarded: dict[str, int] = {}
        self.killed_at: dict[str, int] = {}
        self.refusal = ""
        self.listening: set[int] = set()
        self.problem = ""
        self.kernel: dict[str, str] = {}  # what the programs that tell of it print; the others are not there
        self.clock = 0.0  # seconds that its clock is ahead
        self.answering = threading.Lock()
        self.api = self
        answers = {"facts": self.facts, "docker_logs": self.docker_logs, "mkdir": self.mkdir, "guard": self.guard}
        self.session = FakeSession(answers)

    def find(self, id_: str) -> Container | None:
        return next((container for container in self.containers if container.id == id_), None)

    def facts(
        self,
        docker: tuple[str, ...] = (),
        files: tuple[str, ...] = (),
        timeout: float = 0,
        commands: dict[str, list[str]] | None = None,
    ) -> dict[str, Any]:
        meminfo = f"MemTotal: 125000000 kB\nMemAvailable: {self.available_kb} kB\nSwapTotal: 8 kB\nSwapFree: 8 kB\n"
        with self.answering:
            answered = {path: {"error": self.problem} if self.problem else self.get(path) for path in docker}
        rows = [f"   0: 00000000:{port:04X} 00000000:0000 0A 00000000:00000000" for port in self.listening]
        texts = {path: "\n".join(rows) if "/net/tcp" in path else meminfo for path in files}
        outputs = {name: self.kernel.get(name) for name in commands or ()}
        kernel = {name: None if out is None else {"code": 0, "out": out, "err": ""} for name, out in outputs.items()}
        return {"time": time.time() + self.clock, "docker": answered, "files": texts, "commands": kernel}

    def get(self, path: str) -> dict[str, Any]:
        if path.startswith("/containers/json?all=1"):
            rows = [
                {"Id": c.id, "Names": [f"/{c.name}"], "State": c.state, "Image": "image", "Labels": c.labels}
                for c in self.containers
                if "filters" not in path or READER_LABEL in c.labels
            ]
            return {"status": 200, "body": rows}
        _, kind, id_, action = path.split("/")
        found = self.find(id_)
        if kind != "containers":
            raise Unscripted(path)
        if found is None:
            return {"status": 404, "body": {"message": "No such container"}}
        if action == "json":
            return {"status": 200, "body": found.inspected()}
        if action == "top?ps_args=-eo%20pid,stat,args":
            running = found.state == "running"
            return {"status": 200 if running else 409, "body": {"Processes": found.processes}}
        raise Unscripted(path)

    def docker_logs(self, container: str, since: str, tail: str, timeout: float = 0) -> dict[str, Any]:
        found = self.find(container)
        if found is None:
            return {"status": 404, "body": {"message": "No such container"}}
        lines = [[stamp(moment), text] for moment, text in found.log if moment >= float(since or 0)]
        return {"status": 200, "lines": lines[-int(tail) :] if tail else lines, "more": False, "time": time.time()}

    def guard(self, container: str, floor: int, timeout: float = 0) -> dict[str, Any]:
        self.guarded[container] = floor
        return {"killed_at": self.killed_at.get(container)}

    def guard_kills(self, container: Container, available: int) -> None:
        """Do what the node's own guard does, at its own time."""
        self.killed_at[container.id] = available
        container.end(137)

    def mkdir(self, paths: list[str]) -> dict[str, Any]:
        self.events.append(f"mkdir {len(paths)}")
        return {}

    # -- docker-py's low-level client ---------------------------------------------------------------------------------

    def create_host_config(self, **options: Any) -> dict[str, Any]:
        return options

    def create_container(self, **options: Any) -> dict[str, str]:
        if self.refusal:
            raise docker.errors.APIError("refused", explanation=self.refusal)
        made = Container(options["name"], options["labels"], state="created")
        made.id = f"new-{made.name}"
        self.containers.append(made)
        self.events.append(f"create {made.name}")
        return {"Id": made.id}

    def start(self, id_: str) -> None:
        found = self.existing(id_)
        found.state, found.started = "running", time.time()
        self.events.append(f"start {found.name}")

    def kill(self, id_: str, signal: str) -> None:
        found = self.existing(id_)
        if found.state != "running":
            raise docker.errors.APIError("conflict", explanation=f"Container {id_} is not running")
        self.events.append(f"{signal} {found.name}")
        if signal == "SIGKILL" or not found.ignores_sigterm:
            found.end(137 if signal == "SIGKILL" else 0)

    def remove_container(self, id_: str, force: bool) -> None:
        self.containers.remove(self.existing(id_))
        self.events.append(f"remove {id_.removeprefix('id-').removeprefix('new-')[:16]}")

    def existing(self, id_: str) -> Container:
        found = self.find(id_)
        if found is None:
            raise docker.errors.NotFound("missing", explanation="No such container")
        return found

    def close(self) -> None:
        """Nothing to end."""
