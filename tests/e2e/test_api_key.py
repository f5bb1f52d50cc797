"""A pair whose API needs a key: every command that asks the engine has it, and it is nowhere to be seen."""

from __future__ import annotations

import time

import pytest

from tests.e2e.load import API
from tests.e2e.test_engine_faults import RANKS, state
from tests.e2e.watching import watching
from tests.lab.pair import HOME, Pair

pytestmark = pytest.mark.faults
KEY = "sk-lab-6f1d0c9e2b"
FILE = f"{HOME}/api-key"


def test_an_api_key_from_start_to_saved_logs(prepared: Pair) -> None:
    prepared.write(FILE, f"{KEY}\n", mode="600")
    prepared.write_settings(SPARKSERVE_API_KEY_FILE=FILE)
    answer = prepared.ask("up")
    assert answer["exit_code"] == 0, answer["errors"]
    assert {proof["verdict"] for proof in answer["data"]["proofs"]} == {"ok"}
    asked = prepared.head.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"{API}/v1/models"])
    assert asked.stdout == b"401", "without the key nothing is answered"
    assert state(prepared) == ("running", 0, "idle; a one-token completion was answered")
    with watching(prepared) as watch:
        watch.wait_for("running")
        time.sleep(2)
        assert set(watch.kinds()) == {"running"}
    inspected = [node.docker("inspect", name) for node, name in zip(prepared.lab.nodes, RANKS, strict=True)]
    prepared.write(FILE, "sk-lab-another\n", mode="600")
    found, code, why = state(prepared)
    assert (found, code) == ("degraded", 5)
    assert "another API key than ours" in why
    prepared.write(FILE, f"{KEY}\n", mode="600")
    assert prepared.ask("stop")["exit_code"] == 0
    saved = prepared.sparkserve("logs", "--run", "last")
    assert saved.returncode == 0
    shown = [saved.stdout.decode(), *inspected, prepared.sparkserve("history", "--json").stdout.decode()]
    shown.append(prepared.head.run(["grep", "-r", ".", f"{HOME}/.local/state/sparkserve"]).stdout.decode())
    assert not any(KEY in text for text in shown)
