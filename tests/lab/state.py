"""What is written down about a running lab, so that any other process can find it, or clean up after it."""

import json
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from tests.lab.machine import LabError, Process
from tests.lab.network import Subnets


@dataclass(frozen=True)
class State:
    """The processes that hold a lab's namespaces, and its networks."""

    subnets: Subnets
    switch: Process
    nodes: dict[str, Process]

    @property
    def processes(self) -> list[Process]:
        """All of them."""
        return [*self.nodes.values(), self.switch]

    def save(self, folder: Path) -> None:
        """Write the state in one piece."""
        subnets = {name: str(getattr(self.subnets, name)) for name in ("management", "link", "twin")}
        nodes = {name: vars(process) for name, process in self.nodes.items()}
        content = {"subnets": subnets, "switch": vars(self.switch), "nodes": nodes}
        fresh = folder / "state.json.new"
        fresh.write_text(json.dumps(content, indent=2) + "\n")
        fresh.replace(folder / "state.json")

    @classmethod
    def load(cls, folder: Path) -> "State | None":
        """Read the state of the last `up` that got as far as its processes, running or not."""
        try:
            content: dict[str, Any] = json.loads((folder / "state.json").read_text())
        except FileNotFoundError:
            return None
        subnets = Subnets(**{name: IPv4Network(text) for name, text in content["subnets"].items()})
        nodes = {name: Process(**fields) for name, fields in content["nodes"].items()}
        return cls(subnets, Process(**content["switch"]), nodes)

    @classmethod
    def of_running(cls, folder: Path) -> "State":
        """Read the state of a lab that must be up."""
        state = cls.load(folder)
        if state is None or not all(process.alive for process in state.processes):
            raise LabError("the lab is not up: python -m tests.lab up")
        return state
