"""Labs side by side, and what is left of one that was taken down, interrupted or killed: nothing."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.machine import wait_until
from tests.lab.nodes import Lab

pytestmark = pytest.mark.faults

CHECKOUT = Path(__file__).parents[2]
ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
# Whoever runs the tests may have been started by nohup, and children inherit what it ignores.
PROGRAM = """
import pathlib, signal, sys, time
from tests.lab.nodes import Lab
signal.signal(signal.SIGHUP, signal.SIG_DFL)
lab = Lab.for_checkout(pathlib.Path(sys.argv[1]))
"""


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Lab]:
    yield from lab_in(tmp_path / "first")


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Lab]:
    yield from lab_in(tmp_path / "second")


def lab_in(folder: Path) -> Iterator[Lab]:
    """A lab of a folder that is nobody's checkout; only the base image is taken from ours."""
    cache = CHECKOUT / ".lab/cache"
    cache.mkdir(parents=True, exist_ok=True)
    lab = Lab.for_checkout(folder)
    lab.folder.mkdir(parents=True)
    (lab.folder / "cache").symlink_to(cache)
    yield lab
    lab.down()
    assert traces(lab) == []


def traces(lab: Lab) -> list[str]:
    """Everything on the machine that still carries the mark of a lab."""
    marks = (str(lab.folder), f"lab{lab.identity}", f"sparkserve-lab-{lab.identity}")
    found = [line for line in Path("/proc/mounts").read_text().splitlines() if any(mark in line for mark in marks)]
    found += [name.name for name in Path("/sys/class/net").iterdir() if name.name in marks]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{marks[2]}*")]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(mark in words for mark in marks):
            found.append(f"{folder.name} {words}")
    return found


def processes_in(namespaces: set[Path]) -> list[str]:
    """Every process, whatever its name, that still lives in one of the network namespaces."""
    found = []
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if link.readlink() in namespaces:
                found.append(link.parts[2])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_two_labs_run_side_by_side(first: Lab, second: Lab) -> None:
    first.up()
    second.up()
    second.head.docker("run", "--detach", "--init", second.registry_reference, "sleep", "300")
    addresses = {node.management_address for node in (*first.nodes, *second.nodes)}
    assert len(addresses) == 4
    assert second.gateway_address != first.gateway_address
    assert second.worker.run(["hostname"]).stdout != first.worker.run(["hostname"]).stdout
    namespaces = {Path(f"/proc/{node.pid}/ns/net").readlink() for node in second.nodes}
    assert len(processes_in(namespaces)) > 6
    second.down()
    second.down()
    wait_until(lambda: traces(second) == [] and processes_in(namespaces) == [], "end of all traces", 60)
    assert first.head.docker("version")


@pytest.mark.parametrize("sign", ["state.json", "nodes/worker/log/sshd.log", "nodes/head/log/registry.log"])
def test_an_up_that_is_killed_half_way_leaves_nothing_and_can_be_repeated(second: Lab, sign: str) -> None:
    program = "import sys, pathlib; from tests.lab.nodes import Lab; Lab.for_checkout(pathlib.Path(sys.argv[1])).up()"
    with subprocess.Popen([sys.executable, "-c", program, str(second.checkout)], cwd=CHECKOUT) as starting:
        wait_until((second.folder / sign).exists, sign, 60)
        starting.kill()
    processes = [int(node["pid"]) for node in json.loads((second.folder / "state.json").read_text())["nodes"].values()]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes), "end of both nodes", 60)
    assert not second.is_up
    second.up()
    assert second.worker.docker("ps", "--quiet") == ""


@pytest.mark.parametrize("number", ENDING)
def test_an_up_that_is_interrupted_takes_down_what_it_made(second: Lab, number: int) -> None:
    argv = [sys.executable, "-c", PROGRAM + "lab.up()", str(second.checkout)]
    with subprocess.Popen(argv, cwd=CHECKOUT, stderr=subprocess.DEVNULL) as starting:
        wait_until((second.folder / "state.json").exists, "state.json", 60)
        os.kill(starting.pid, number)
        assert starting.wait(60) != 0
    assert not (second.folder / "state.json").exists()
    wait_until(lambda: traces(second) == [], "end of all traces", 60)


@pytest.mark.parametrize("number", ENDING)
def test_a_run_that_is_interrupted_leaves_no_container(second: Lab, number: int) -> None:
    program = """
with lab.session():
    lab.head.docker("run", "--detach", "--init", lab.registry_reference, "sleep", "300")
    print(*(node.pid for node in lab.nodes), flush=True)
    time.sleep(60)
"""
    argv = [sys.executable, "-c", PROGRAM + program, str(second.checkout)]
    with subprocess.Popen(argv, cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        namespaces = {Path(f"/proc/{pid}/ns/net").readlink() for pid in running.stdout.readline().decode().split()}
        assert len(namespaces) == 2
        os.kill(running.pid, number)
        assert running.wait(60) != 0
    wait_until(lambda: traces(second) == [] and processes_in(namespaces) == [], "end of all traces", 60)


def test_a_file_replaced_in_the_checkout_is_seen_on_the_nodes_at_once(second: Lab) -> None:
    second.up()
    fresh = second.checkout / "fresh.txt"
    for text in ("one", "two"):
        replacement = fresh.with_suffix(".new")
        replacement.write_text(text)
        replacement.replace(fresh)
        assert second.head.run(["cat", str(fresh)]).stdout.decode() == text
