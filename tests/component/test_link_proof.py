"""The proof of the cable with real sockets and real processes, both ends on this machine's loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkserve import link_program, link_proof
from sparkserve.checks import Check
from sparkserve.cluster import Cluster, Node, Role
from sparkserve.hosts import LocalHost
from sparkserve.link import LinkFacts
from sparkserve.settings import Settings
from tests.unit.cases import wait_for

ENDS: dict[Role, str] = {"head": "127.0.0.1", "worker": "127.0.0.2"}
PERFTEST = """#!{python}
import socket, sys
port = int(sys.argv[sys.argv.index("-p") + 1])
if sys.argv[-1] == "--report_gbits":
    socket.create_server(("127.0.0.2", port)).accept()
else:
    socket.create_connection((sys.argv[-1], port))
print("#bytes #iterations BW peak[Gb/sec] BW average[Gb/sec]")
print("65536 1000 0.00", {{"rocep1s0f1": 98.5, "roceP2p1s0f1": 0.5}}[sys.argv[sys.argv.index("-d") + 1]])
"""


def links(**changes: Any) -> dict[Role, LinkFacts]:
    hcas = ("rocep1s0f1", "roceP2p1s0f1")
    return {
        role: LinkFacts(**{**{"address": address, "interface": "lo", "twin": "", "hcas": hcas, "gid_index": 3,
                              "mtu": 1500, "speed_mbps": None, "interfaces": ()}, **changes})
        for role, address in ENDS.items()
    }  # fmt: skip


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    head, worker = (Node(role, LocalHost(role), Settings()) for role in ENDS)
    with contextlib.closing(head), contextlib.closing(worker):
        yield Cluster(head, worker)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def verdicts(checks: list[Check]) -> list[tuple[str, str, str]]:
    return [(check.id, check.node, check.verdict) for check in checks]


PROVED = [
    ("link_mtu_path", "head", "ok"),
    ("link_mtu_path", "worker", "ok"),
    ("link_tcp", "head", "ok"),
    ("link_tcp", "worker", "ok"),
]
CARRIED = [("link_bandwidth", "head", "ok"), ("link_bandwidth", "worker", "ok")]


def test_all_of_it(cluster: Cluster) -> None:
    port = free_port()
    checks = link_proof.prove(cluster, links(hcas=()), master_port=port, floor=0.1, is_idle=lambda: True)
    assert verdicts(checks) == [*PROVED, *CARRIED]
    assert f"{port} (rendezvous)" in checks[3].observed


def test_perftest_over_each_half(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "ib_write_bw"
    tool.write_text(PERFTEST.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    checks = link_proof.prove(cluster, links(), master_port=free_port(), floor=1.0, is_idle=lambda: True)
    fast, slow = checks[6:]
    assert fast.observed == "98.5 Gb/s from rocep1s0f1 to rocep1s0f1 by RDMA"
    assert verdicts([fast, slow]) == [("link_rdma_bandwidth", "head", "ok"), ("link_rdma_bandwidth", "head", "fail")]


def test_no_perftest(cluster: Cluster) -> None:
    checks = link_proof.prove(cluster, links(), master_port=free_port(), floor=0.1, is_idle=lambda: True)
    assert verdicts(checks[6:]) == [("link_rdma_bandwidth", "", "warn")]
    assert checks[6].hint == "sudo apt-get install perftest"


def test_a_pair_that_may_serve_is_not_disturbed(cluster: Cluster) -> None:
    checks = link_proof.prove(cluster, links(), master_port=free_port())
    assert verdicts(checks) == [*PROVED, ("link_bandwidth", "", "warn")]
    assert checks[-1].observed == "not measured: Docker does not say whether a pair runs"


def test_the_meeting_port_of_a_stranger(cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        checks = link_proof.prove(cluster, links(), master_port=port)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):  # nobody knocked
            server.accept()
    assert verdicts(checks)[2:5] == [("link_tcp", "head", "fail"), *PROVED[2:]]
    assert f"port {port} (rendezvous) cannot be opened" in checks[2].observed


def test_a_cable_that_is_not_known(cluster: Cluster) -> None:
    found = {**links(), "worker": links(interface="")["worker"]}
    (check,) = link_proof.prove(cluster, found, master_port=free_port())
    assert verdicts([check]) == [("link_tcp", "worker", "fail")]
    none = link_proof.prove(cluster, {}, master_port=free_port())
    assert verdicts(none) == [("link_tcp", "head", "fail"), ("link_tcp", "worker", "fail")]


def listening(pid: int) -> set[str]:
    """Give the local addresses of all sockets of a process, as /proc knows them."""
    try:
        inodes = {str(path.readlink()).strip("socket:[]") for path in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:
        return set()
    rows = [line.split() for name in ("tcp", "udp") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[9] in inodes}


@pytest.fixture
def program() -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-I", link_program.__file__]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ask(program: subprocess.Popen[bytes], do: str, **fields: Any) -> None:
    assert program.stdin is not None
    program.stdin.write(json.dumps({"id": 1, "do": do, **fields}).encode() + b"\n")
    program.stdin.flush()


def test_nothing_outlives_its_input(program: subprocess.Popen[bytes], tmp_path: Path) -> None:
    ask(program, "listen", address="127.0.0.1", port=0)
    assert program.stdout is not None
    assert b'"result"' in program.stdout.readline()
    assert len(listening(program.pid)) == 3
    child = tmp_path / "child"
    ask(program, "run", argv=["sh", "-c", f"echo $$ > {child}; exec sleep 60"], seconds=60)
    wait_for(lambda: child.exists() and child.read_text() != "", "the child")
    assert program.stdin is not None
    program.stdin.close()
    assert program.wait(5) == 0
    pid = int(child.read_text())
    wait_for(
        lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), "its end"
    )


def test_a_tool_that_has_no_end(program: subprocess.Popen[bytes]) -> None:
    ask(program, "run", argv=["sleep", "60"], seconds=0.1)
    assert program.stdout is not None
    assert json.loads(program.stdout.readline()) == {"id": 1, "result": None}
