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


GUARD = """
from tests.lab.__main__ import guard

class Lab:
    def down(self):
        assert pathlib.Path("ended").exists() == (sys.argv[1] == "unwinds")
        os.kill(os.getpid(), signal.SIGINT)  # nor does Ctrl-C end the taking down
        pathlib.Path("down").touch()

signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.exit(guard(Lab(), [sys.executable, "-c", *sys.argv[2:]]))
"""
UNWINDS = """
with termination_raises():
    try:
        print("runs", flush=True)
        signal.pause()
    finally:
        pathlib.Path("ended").touch()
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("print('the closing line')", 0),
        ("print('the closing line'); raise SystemExit(5)", 5),
        ("import os; print('the closing line', flush=True); os.kill(os.getpid(), 9)", 137),
        ("import faulthandler, time; faulthandler.dump_traceback_later(0.1, exit=True); time.sleep(60)", 1),
    ],
)
def test_what_is_guarded_keeps_its_exit_code_and_its_last_line(tmp_path: Path, program: str, code: int) -> None:
    done = run(tmp_path, "-c", RUN + GUARD, "any", program)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "down").exists()
    assert done.stdout in ("the closing line\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_what_is_guarded_and_it_unwinds_first(tmp_path: Path, number: int) -> None:
    argv = [sys.executable, "-c", RUN + GUARD, "unwinds", RUN + UNWINDS]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        assert guard.stdout.readline() == b"runs\n"
        guard.send_signal(number)
        _, said = guard.communicate(timeout=30)
    assert (tmp_path / "down").exists(), said.decode()
    assert guard.returncode == 130


@pytest.mark.parametrize(
    ("target", "is_guarded"),
    [*((name, True) for name in ("test", "test-all", "test-vllm", "rehearse", "bench")), ("bench ONLY=cli", False)],
)
def test_every_target_that_uses_the_lab_is_guarded(tmp_path: Path, target: str, is_guarded: bool) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    made = ["make", "--dry-run", "-o", "lab-ready", "-o", "ready", "installed=ready", "python=PYTHON", *target.split()]
    environment = {"PATH": os.environ["PATH"]}  # nothing of a make that runs these tests
    shown = subprocess.run(made, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert ("PYTHON -m tests.lab guard -- " in shown) == is_guarded
    assert len(shown.splitlines()) == 1
