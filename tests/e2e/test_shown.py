"""What a person sees of a pair that serves: one screen, one that changes, and both logs while they grow."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.e2e.load import request, users
from tests.e2e.test_engine_faults import RANKS, state
from tests.e2e.test_faults import launch
from tests.lab.pair import Pair

pytestmark = pytest.mark.lab
ROLES = ("head", "worker")


def test_one_screen_of_a_pair_at_work(steady: Pair) -> None:
    steady.script_engine(decode_tokens_per_second=100)
    with users(steady, 1, request("go on", max_tokens=4000, ignore_eos=True)):
        data = steady.ask("status")["data"]
        shown = steady.sparkserve("status").stdout.decode().splitlines()
    assert (data["state"], data["context"]) == ("running", 65_536)
    assert (data["requests_running"], data["requests_waiting"]) == (1, 0)
    assert 20 < data["tokens_per_second"] < 200
    assert 0 < data["uptime_seconds"] < 600
    assert shown[0] == "running: busy (1 running, 0 waiting); the counters move"
    assert re.fullmatch(r"up \d+ .*, context 65,536, running 1, waiting 0, tokens/s \d+", shown[1])
    assert re.split(r"\s{2,}", shown[2].strip()) == [
        *("node", "container", "memory available", "trend", "swap used", "GPU", "link"),
    ]
    for role, node, row in zip(ROLES, steady.lab.nodes, shown[3:], strict=True):
        seen = data["nodes"][role]
        assert (seen["container"], seen["swap_used_bytes"]) == ("running", 0)
        assert 0 < seen["memory_available_bytes"] < seen["memory_total_bytes"]
        assert (seen["around"]["gpu"]["clock_mhz"], seen["around"]["gpu"]["power_watts"]) == (208, 11.52)
        assert (seen["around"]["interface"], seen["around"]["up"]) == (node.link_interface, True)
        assert seen["trend"]["new_errors"] == {}
        assert row.split()[:2] == [role, "running"]
        assert "208 MHz, 12 W" in row
        assert f"{node.link_interface} up" in row
        assert row.rstrip().endswith("no new errors")


@dataclass
class Terminal:
    """Somebody's terminal with a command in it."""

    process: subprocess.Popen[bytes]
    screen: int

    def read_until(self, pattern: str, seconds: float = 60) -> str:
        """Give what was written to the screen up to a text that matches, without its colours."""
        written, text, deadline = b"", "", time.monotonic() + seconds
        while not re.search(pattern, text, re.DOTALL):
            assert select.select([self.screen], [], [], max(0.0, deadline - time.monotonic()))[0], text
            written += os.read(self.screen, 65_536)
            text = re.sub(r"\x1b\[[\d;]*m", "", written.decode(errors="replace"))
        return text


@contextmanager
def terminal(pair: Pair, *words: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, 200))
    argv, env = pair.command(*words), {"TERM": "xterm-256color"}
    process = pair.head.popen(argv, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_status_again_and_again_in_place_on_a_terminal(serving: Pair) -> None:
    with terminal(serving, "status", "--watch") as shown:
        first = shown.read_until("running: idle.*worker.*no new errors")
        assert first.count("context 65,536") == 1
        assert "208 MHz" in first
        again = shown.read_until("running: idle.*worker.*no new errors")
        assert "\x1b[1A" in again, "it goes back to the first line"
        serving.worker.docker("kill", RANKS[1])
        shown.read_until("degraded: rank 1")
        shown.process.send_signal(signal.SIGINT)
        shown.read_until("interrupted")
        assert shown.process.wait(60) == 130


def test_following_both_logs_and_ctrl_c_that_only_detaches(steady: Pair) -> None:
    before = [node.docker("ps", "-q") for node in steady.lab.nodes]
    process = launch(steady, "logs", "--follow", "--grep", "layers 0|hello")
    assert process.stdout is not None
    kept = [process.stdout.readline().decode() for _ in range(2)]
    assert all("layers 0.." in line for line in kept), kept
    steady.script_engine(log_lines=[{"line": "hello from the lab", "at": "after_ready"}])
    lines: set[str] = set()
    while len(lines) < 2:
        line = process.stdout.readline().decode().strip()
        assert line
        lines |= {line} if "hello" in line else set()
    assert lines == {"rank 0  hello from the lab", "rank 1  hello from the lab"}
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0].decode()
    assert process.returncode == 130
    assert "Traceback" not in output
    assert [node.docker("ps", "-q") for node in steady.lab.nodes] == before
    assert state(steady)[0] == "running"
