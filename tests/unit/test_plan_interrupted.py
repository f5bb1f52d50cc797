from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.unit.cases import ROOT


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_lets_changes_end_and_reports_each(number: signal.Signals, exit_code: int) -> None:
    argv = [sys.executable, "-m", "tests.unit.interrupted_plan"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        process.send_signal(number)
        answer, _ = process.communicate(timeout=15)
    assert process.returncode == exit_code
    assert json.loads(answer) == {
        "applied": ["finishes", "first"],
        "failed": ["breaks"],
        "not_reached": ["later", "polite"],
    }
