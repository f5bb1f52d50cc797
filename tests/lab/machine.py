"""What the lab does on the machine itself: commands, processes known by pid and start time, control groups."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

CONTROL_GROUPS = Path("/sys/fs/cgroup")


class LabError(Exception):
    """The lab cannot do what it was asked for."""


def command(*argv: str | Path, text: str = "", directory: Path | None = None) -> str:
    """Run a command on the machine and return its output; a failure carries what the command said."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, cwd=directory, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LabError(f"{' '.join(map(str, argv))}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    """Poll until the condition holds; say what did not happen when the time is over."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"{what}: not within {seconds:g} s")
        time.sleep(0.03)


@contextmanager
def termination_raises() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that what was made is taken down.

    It is KeyboardInterrupt, with the number, since pytest takes every other exception for one failed test and goes on.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup does
            signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not _leave:  # else what is around this one still has to be taken down
                signal.signal(number, handler)


def _leave(number: int, _frame: FrameType | None) -> None:
    # A closed terminal sends its signal twice, through the kernel and through the shell.
    for one in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


@dataclass(frozen=True)
class Process:
    """A process that cannot be taken for a later one with the same number."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "Process":
        """Take down the identity of a running process."""
        started = _start_time(pid)
        if started is None:
            raise LabError(f"process {pid} is gone")
        return cls(pid, started)

    @property
    def alive(self) -> bool:
        """Whether this very process still runs."""
        return _start_time(self.pid) == self.started

    def kill(self) -> None:
        """End it, and so all that lives in its PID namespace; return when it is gone."""
        if self.alive:
            os.kill(self.pid, signal.SIGKILL)
        wait_until(lambda: not self.alive, f"end of process {self.pid}", 60)


def _start_time(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def processes_named(names: set[str], namespace_of: int) -> list[int]:
    """Find the processes of some names that live in the same PID namespace as the given one."""
    wanted = Path(f"/proc/{namespace_of}/ns/pid").readlink()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "comm").read_text().strip() in names and (folder / "ns/pid").readlink() == wanted:
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def remove_control_groups(name: str) -> None:
    """Remove the empty groups that the lab's containers leave in every hierarchy."""

    def removed() -> bool:
        for top in (CONTROL_GROUPS / name, *CONTROL_GROUPS.glob(f"*/{name}")):
            for folder, _, _ in os.walk(top, topdown=False):
                try:
                    Path(folder).rmdir()
                except OSError:  # processes that were killed just now still count for a moment
                    return False
        return True

    wait_until(removed, f"removal of the control groups {name}", 60)
