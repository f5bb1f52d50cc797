"""A signal that comes early: while all is imported, and while a command begins."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.unit.cases import ROOT

# Sends itself the signal when a module is about to be imported.
EARLY = """
import os, runpy, sys
number, where, *words = sys.argv[1:]
class Sender:
    def find_spec(self, name, *rest):
        if name == where:
            os.kill(os.getpid(), int(number))
sys.meta_path.insert(0, Sender())
sys.argv[1:] = words
runpy.run_module("sparkserve", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("where", ["typer", "sparkserve.cli_doctor", "sparkserve.doctor", "sparkserve.settings"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("words", [["doctor", "--json"], ["doctor"]], ids=["json", "person"])
def test_an_early_signal_is_told(where: str, number: signal.Signals, code: int, words: list[str]) -> None:
    argv = [sys.executable, "-c", EARLY, str(int(number)), where, *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code, done.stderr
    if "--json" in words:
        answer = json.loads(done.stdout)
        assert list(answer) == ["schema", "command", "status", "exit_code", "data", "errors"]
        assert (answer["command"], answer["exit_code"]) == ("doctor", code)
        assert [error["code"] for error in answer["errors"]] == ["interrupted"]
    else:
        has_begun = number == signal.SIGINT and where in ("sparkserve.doctor", "sparkserve.settings")
        assert done.stderr.startswith("\nending…\n") is has_begun
        told = done.stderr.removeprefix("\nending…\n")
        assert (done.stdout, told) == ("", "error: interrupted\nhint: the same command can be typed again\n")
