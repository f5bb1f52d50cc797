from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from sparkserve.cluster import NodeSession
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError
from sparkserve.hosts import LocalHost
from tests.unit.cases import wait_for


def test_silence_is_told_and_hurts_nothing_later(session: NodeSession) -> None:
    with pytest.raises(SparkserveError, match=r"no answer to `facts` within 0\.2 s") as caught:
        session.ask("facts", commands={"slow": ["sleep", "1"]}, timeout=0.2)
    assert (caught.value.code, caught.value.exit_code) == ("node_silent", EXIT_COULD_NOT_LOOK)
    assert session.ask("hello")["hostname"]


def start_program() -> tuple[LocalHost, NodeSession, int]:
    host = LocalHost("head")
    session = NodeSession(host)
    pid = int(session.ask("facts", commands={"me": ["sh", "-c", "echo $PPID"]})["commands"]["me"]["out"])
    return host, session, pid


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_it_ends_with_its_standard_input() -> None:
    _, session, pid = start_program()
    assert is_running(pid)
    session._process.stdin.close()
    wait_for(lambda: not is_running(pid), "the program ended")
    session.close()


def test_close_ends_it() -> None:
    _, session, pid = start_program()
    session.close()
    wait_for(lambda: not is_running(pid), "the program ended")
    with pytest.raises(SparkserveError):
        session.ask("hello")


def test_a_program_that_is_killed_is_told_at_once() -> None:
    _, session, pid = start_program()
    threading.Timer(0.2, os.kill, (pid, 9)).start()
    begun = time.monotonic()
    with pytest.raises(SparkserveError) as caught:
        session.ask("facts", commands={"slow": ["sleep", "95"]}, timeout=90)
    assert (caught.value.code, caught.value.node, caught.value.exit_code) == ("node_ended", "head", EXIT_COULD_NOT_LOOK)
    assert time.monotonic() - begun < 60
    session.close()


def test_a_shell_that_greets_ends_nothing(tmp_path: Path) -> None:
    greeting = tmp_path / "python3"
    greeting.write_text('#!/bin/sh\necho "Welcome to the machine"\nexec /usr/bin/python3 "$@"\n')
    greeting.chmod(0o755)
    host = LocalHost("head")
    host.python = str(greeting)
    session = NodeSession(host)
    assert session.ask("hello", timeout=60)["hostname"]
    session.close()
