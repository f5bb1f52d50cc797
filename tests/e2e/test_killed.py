"""A launcher that is killed, at every place of an `up`, a start, a switch: the next command brings it to its end."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import OTHER
from tests.e2e.load import requests
from tests.e2e.test_faults import RANKS, RECIPE, assert_ends_proved, launch, names, wait_for_line
from tests.lab.pair import Pair

pytestmark = pytest.mark.faults
KILL, INT, TERM = signal.SIGKILL, signal.SIGINT, signal.SIGTERM
CODES = {KILL: -KILL, INT: 130, TERM: 143}


def end(pair: Pair, process: subprocess.Popen[bytes], number: signal.Signals) -> str:
    """Send a signal; whatever was under way, the launcher ends by it."""
    process.send_signal(number)
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == CODES[number], output
    assert "Traceback" not in output
    if not running(pair):  # a rank that was killed could not give back what it took of these figures
        for node in pair.lab.nodes:
            node.set_meminfo(MemAvailable=119_000_000, MemFree=118_000_000)
    return output


def running(pair: Pair) -> list[str]:
    return [name for node in pair.lab.nodes for name in node.docker("ps", "--format", "{{.Names}}").split()]


# Each way of ending goes through the same steps: two of them have all three.
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("head: download", KILL),
        ("head: build", KILL),
        ("head: build", INT),
        ("worker: ship", KILL),
        ("worker: ship", TERM),
        ("worker: sync", KILL),
        ("worker: sync", INT),
        ("worker: start", KILL),
        ("worker: start", TERM),
    ],
)
def test_a_launcher_killed_in_a_step(pair: Pair, moment: str, number: signal.Signals) -> None:
    pair.forget_everything()
    process = launch(pair, "up")
    wait_for_line(process, f"^{moment} ")
    time.sleep(0.4)
    end(pair, process, number)
    if number != KILL:
        assert names(pair) in ([], RANKS)
    assert_ends_proved(pair)


@pytest.mark.parametrize("number", CODES)
def test_a_launcher_killed_while_it_removes_the_old_pair(serving: Pair, number: signal.Signals) -> None:
    serving.write_settings(SPARKSERVE_CONTEXT="32768")
    serving.script_engine(ignore_sigterm=True)
    process = launch(serving, "start")
    wait_for_line(process, "^head: start .*SIGTERM")
    end(serving, process, number)
    assert running(serving) in ([], RANKS)
    serving.script_engine()
    assert_ends_proved(serving)


@pytest.mark.parametrize("number", CODES)
def test_a_launcher_killed_while_it_waits_for_the_first_token(prepared: Pair, number: signal.Signals) -> None:
    prepared.script_engine(completions="hang")
    process = launch(prepared, "start")
    wait_for_line(process, "waiting for the first token")
    end(prepared, process, number)
    assert running(prepared) == (RANKS if number == KILL else [])
    prepared.script_engine()
    assert_ends_proved(prepared)


@pytest.fixture
def warming(prepared: Pair) -> Iterator[Pair]:
    """A pair whose start ends with a first long prompt: its engine works at it for longer than `end` waits."""
    path = f"{RECIPE}/recipe.toml"
    text = prepared.head.run(["cat", path]).stdout.decode()
    patient = text.replace("_seconds = 60", "_seconds = 600")
    prepared.write(path, patient.replace("[readiness]", "[readiness]\nwarm_up_tokens = 30_000"))
    prepared.script_engine(prefill_tokens_per_second=200)
    yield prepared
    prepared.write(path, text)


@pytest.mark.parametrize("number", CODES)
def test_a_launcher_killed_while_the_pair_warms_up(warming: Pair, number: signal.Signals) -> None:
    process = launch(warming, "start")
    wait_for_line(process, "warming up with 30,000 tokens")
    deadline = time.monotonic() + 30
    while not requests(warming)["running"]:
        assert time.monotonic() < deadline, requests(warming)
        time.sleep(0.1)
    assert requests(warming)["total"] == 1, "the first token came, the long prompt is under way"
    end(warming, process, number)
    assert running(warming) == (RANKS if number == KILL else [])
    warming.script_engine()
    assert_ends_proved(warming)


def test_a_stop_ends_what_a_launcher_left_that_was_killed_while_the_ranks_load(prepared: Pair) -> None:
    prepared.script_engine(load_seconds_first=60, load_seconds_later=60)
    process = launch(prepared, "start")
    wait_for_line(process, "^head: start .*loading layers")
    end(prepared, process, KILL)
    assert running(prepared) == RANKS
    assert prepared.ask("stop")["exit_code"] == 0
    assert names(prepared) == []


@pytest.mark.parametrize("number", CODES)
def test_a_launcher_killed_during_a_switch(other: Pair, number: signal.Signals) -> None:
    other.script_engine(load_seconds_first=60, load_seconds_later=60)
    process = launch(other, "start", "--recipe", OTHER)
    wait_for_line(process, "^head: start .*loading layers")
    end(other, process, number)
    assert running(other) == (RANKS if number == KILL else [])
    other.script_engine()
    assert_ends_proved(other, recipes=2)


@pytest.mark.parametrize("number", [INT, TERM])
def test_a_launcher_interrupted_while_it_brings_the_earlier_pair_back(other: Pair, number: signal.Signals) -> None:
    # The other recipe's ranks end before they load: the pair that loads is the one that comes back.
    bad = 'schema = 1\nextends = "lab"\nname = "other"\n[launch.env]\nNCCL_SOCKET_IFNAME = "nosuch0"\n'
    other.write(f"{OTHER}/recipe.toml", bad)
    other.script_engine(load_seconds_first=60, load_seconds_later=60)
    process = launch(other, "start", "--recipe", OTHER)
    wait_for_line(process, "^head: start .*loading layers")
    end(other, process, number)
    assert names(other) == []
    other.script_engine()
    assert_ends_proved(other, recipes=2)


@pytest.mark.parametrize("number", [INT, TERM])
def test_an_interrupted_download_says_how_to_go_on(pair: Pair, number: signal.Signals) -> None:
    pair.forget_everything()
    pair.write_settings(SPARKSERVE_RATE_LIMIT="8MB")
    process = launch(pair, "up")
    wait_for_line(process, "^head: download ")
    time.sleep(1)
    assert "`sparkserve up` goes on where it ended" in end(pair, process, number)
    pair.write_settings()
    assert_ends_proved(pair)


def test_two_commands_at_once(serving: Pair) -> None:
    serving.script_engine(ignore_sigterm=True)
    process = launch(serving, "stop")
    wait_for_line(process, "^head: stop")
    answer = serving.ask("up")
    serving.script_engine()
    process.send_signal(INT)
    process.communicate(timeout=120)
    (error,) = answer["errors"]
    assert (answer["exit_code"], error["code"]) == (3, "locked")
    assert re.search(r"`sparkserve stop`, process \d+, since \d{4}-", error["message"])
    assert serving.ask("stop", "--force")["exit_code"] == 0
    assert names(serving) == []
