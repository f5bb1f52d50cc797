"""Start the processes that hold a lab's namespaces: one per node, and one for the management network's switch."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.lab.machine import LabError, Process

NODE_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--propagation", "private")
NODE_BOOT = Path(__file__).with_name("node_boot.py")
SWITCH = 'echo $$; read -r word && [ "$word" = go ] && exec sleep infinity >/dev/null 2>&1 </dev/null'


@dataclass(frozen=True)
class Holder:
    """A process that lives only as long as we do, until it is told to go on."""

    process: Process
    to: IO[bytes]
    answers: IO[bytes]
    log: Path

    @classmethod
    def start(cls, argv: list[str], log: Path) -> "Holder":
        """Start it in a session of its own, adopted by the machine's first process."""
        with log.open("wb") as errors:
            launcher = subprocess.Popen(
                ["setsid", "--fork", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        launcher.wait()
        if launcher.stdin is None or launcher.stdout is None:
            raise LabError("no pipes")
        line = launcher.stdout.readline()
        if not line:
            raise LabError(f"{argv[0]} did not start: {log.read_text()}")
        return cls(Process.of(int(line)), launcher.stdin, launcher.stdout, log)

    @classmethod
    def start_node(cls, log: Path) -> "Holder":
        """Start the first process of a node; it waits for its description."""
        return cls.start(["unshare", *NODE_NAMESPACES, sys.executable, "-I", "-S", str(NODE_BOOT)], log)

    @classmethod
    def start_switch(cls, log: Path) -> "Holder":
        """Start the process that holds the management network."""
        return cls.start(["unshare", "--net", "sh", "-c", SWITCH], log)

    def describe(self, spec: dict[str, Any]) -> None:
        """Tell a node what to build."""
        self._write(json.dumps(spec))

    def wait_ready(self) -> None:
        """Wait until it is built."""
        if self.answers.readline() != b"ready\n":
            raise LabError(f"a node did not boot: {self.log.read_text()}")

    def go(self) -> None:
        """Let it live on without us."""
        self._write("go")

    def close(self) -> None:
        """Let go of the pipes; before `go` this ends the process."""
        self.to.close()
        self.answers.close()

    def _write(self, line: str) -> None:
        self.to.write(line.encode() + b"\n")
        self.to.flush()
