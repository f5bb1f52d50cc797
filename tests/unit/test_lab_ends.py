"""The lab is taken down however a run ends: by a signal, in pytest and out of it, and by `make` behind a hard end."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cases import ROOT

RUN = """
import os, pathlib, signal, sys
from tests.lab.machine import termination_raises

def lose(number):
    os.kill(os.getpid(), number)
    raise RuntimeError("the signal did not interrupt")
"""
SUITE = (
    RUN
    + """
import pytest

@pytest.fixture(scope="session", autouse=True)
def lab():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with termination_raises():
        try:
            yield
        finally:
            with termination_raises():
                pass
            os.kill(os.getpid(), NUMBER)  # what comes again does not end the taking down
            pathlib.Path("down").touch()

def test_interrupted():
    lose(NUMBER)

def test_later():
    pathlib.Path("later").touch()
"""
)


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run our Python in a folder, where the lab's modules are found."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *argv], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_whole_run_of_pytest_and_takes_down(tmp_path: Path, number: int) -> None:
    (tmp_path / "test_it.py").write_text(SUITE.replace("NUMBER", str(int(number))))
    done = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    assert (tmp_path / "down").exists(), done.stdout
    assert not (tmp_path / "later").exists(), done.stdout
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_lab_by_hand_tells_its_signal_by_its_exit_code(tmp_path: Path, number: int) -> None:
    program = """
import tests.lab.__main__ as lab

def carry_out(*_):
    with termination_raises(), termination_raises():
        lose(int(sys.argv[2]))

signal.signal(signal.SIGHUP, signal.SIG_DFL)
lab._carry_out = carry_out
number = sys.argv.pop()
sys.argv = ["lab", "up", number]
lab._parser = lambda: type("Parser", (), {"parse_args": lambda self: None})()
sys.exit(lab.main())
"""
    done = run(tmp_path, "-c", RUN + program, str(int(number)))
    assert done.returncode == 128 + number, done.stderr


def test_who_ignores_a_closed_terminal_goes_on(tmp_path: Path) -> None:
    program = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
with termination_raises():
    os.kill(os.getpid(), signal.SIGHUP)
assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    done = run(tmp_path, "-c", RUN + program)
    assert done.returncode == 0, done.stderr


PYTHON = """#!/bin/sh
echo "$*" >>calls
case "$*" in *"tests.lab down") exit 0 ;; esac
echo 'the closing line'
kill -%s $$
"""


@pytest.mark.parametrize("target", ["test", "test-all", "test-vllm", "rehearse", "bench"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_make_takes_the_lab_down_behind_a_run_that_ended_hard(tmp_path: Path, target: str, number: int) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON % int(number))
    python.chmod(0o755)
    made = ["make", "--no-print-directory", "-o", "lab-ready", "-o", "ready", "installed=ready", "python=./python"]
    environment = {"PATH": os.environ["PATH"]}  # nothing of a make that runs these tests
    done = subprocess.run(
        [*made, target], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=30
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 2, calls
    assert calls[1] == "-m tests.lab down"
    assert done.returncode != 0
    assert done.stdout.splitlines()[-1] == "the closing line"
