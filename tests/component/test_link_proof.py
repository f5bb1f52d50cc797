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
from sparkserve.errors import SparkserveError
from sparkserve.hosts import LocalHost
from sparkserve.link import LinkFacts
from sparkserve.link_proof import End
from sparkserve.settings import Settings
from tests.unit.cases import wait_for

ENDS: dict[Role, str] = {"head": "127.0.0.1", "worker": "127.0.0.2"}
PERFTEST = """#!{python}
import socket, sys
option = lambda name: sys.argv[sys.argv.index(name) + 1]
assert int(option("-s")) * int(option("-n")) == {amount}
port = int(sys.argv[sys.argv.index("-p") + 1])
if sys.argv[-1] == "--report_gbits":
    socket.create_server(("", port)).accept()
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


def put_perftest(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = directory / "ib_write_bw"
    tool.write_text(script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


def verdicts(checks: list[Check]) -> list[tuple[str, str, str]]:
    return [(check.id, check.node, check.verdict) for check in checks]


PROVED = [
    ("link_mtu_path", "head", "ok"),
    ("link_mtu_path", "worker", "ok"),
    ("link_tcp", "head", "ok"),
    ("link_tcp", "worker", "ok"),
]
LEFT_OUT = [("link_bandwidth", "", "unseen"), ("link_rdma_bandwidth", "", "unseen")]
CARRIED = [("link_bandwidth", "head", "ok"), ("link_bandwidth", "worker", "ok")]


def test_all_of_it(cluster: Cluster) -> None:
    port = free_port()
    checks = link_proof.prove(cluster, links(hcas=()), master_port=port, floor=0.1, is_idle=lambda: True)
    assert verdicts(checks) == [*PROVED, *CARRIED]
    assert f"{port} (rendezvous)" in checks[3].observed


def test_perftest_over_each_half(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put_perftest(tmp_path, monkeypatch, PERFTEST.format(python=sys.executable, amount=link_proof._RDMA_BYTES))
    checks = link_proof.prove(cluster, links(), master_port=free_port(), floor=1.0, is_idle=lambda: True)
    fast = checks[6]
    assert fast.observed == "98.5 Gb/s from rocep1s0f1 to rocep1s0f1 by RDMA"
    assert verdicts(checks[6:]) == [
        ("link_rdma_bandwidth", role, verdict) for role in ("head", "worker") for verdict in ("ok", "fail")
    ]


def test_no_perftest(cluster: Cluster) -> None:
    checks = link_proof.prove(cluster, links(), master_port=free_port(), floor=0.1, is_idle=lambda: True)
    assert verdicts(checks[6:]) == [("link_rdma_bandwidth", "", "warn")]
    assert checks[6].hint == "sudo apt-get install perftest"


def test_a_pair_that_may_serve_is_not_disturbed(cluster: Cluster) -> None:
    checks = link_proof.prove(cluster, links(), master_port=free_port())
    assert verdicts(checks) == [*PROVED, *LEFT_OUT]
    assert checks[-1].observed == "not measured: Docker does not say whether a pair runs"
    assert checks[-1].advice == "later: `sparkserve link --prove`"


def test_what_is_sent_is_bounded() -> None:
    rdma = 2 * 2 * link_proof._RDMA_BYTES  # two halves, two ways
    assert 2 * link_proof._BYTES_EACH_WAY + rdma <= 2 << 30
    assert 2 * link_proof._SECONDS_EACH_WAY + rdma * 8e-9 / link_proof.FLOOR_GBPS < 2


def test_rdma_that_is_dead_is_waited_for_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put_perftest(tmp_path, monkeypatch, "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(link_proof, "_RDMA_PATIENCE", 0.5)
    checks = link_proof.prove(cluster, links(), master_port=free_port(), floor=0.1, is_idle=lambda: True)
    assert verdicts(checks[6:]) == [("link_rdma_bandwidth", "head", "fail")]
    assert checks[6].observed.endswith("no end in time; other halves and ways not tried")


def box(name: str, network: str = "bridge", *, ours: bool = False, **host: Any) -> dict[str, Any]:
    labels = {"sparkserve.owner": "sparkserve"} if ours else {}
    row = {"Id": name.ljust(64, "0"), "Names": [f"/{name}"], "Image": "x", "Labels": labels, "Ports": []}
    inspected = {"Name": f"/{name}", "HostConfig": {"NetworkMode": network, **host}}
    inspected |= {"Config": {"Labels": labels, "Image": "x"}}
    return {"row": {**row, "ImageID": "i", "HostConfig": {"NetworkMode": network}}, "body": inspected}


class Engine:
    """A Docker engine of the given containers, which is asked as the node program asks."""

    def __init__(self, *boxes: dict[str, Any], apps: str | None = None) -> None:
        self.boxes = {f"/containers/{one['row']['Id']}/json": one for one in boxes}
        self.apps = apps

    def ask(self, do: str, **fields: Any) -> Any:
        if do == "hello":
            return {"hostname": "spark", "user": "spark", "uid": 0, "python": "3.12.3", "home": "/root"}
        commands = dict.fromkeys(fields.get("commands", ()))
        if self.apps is not None and "apps" in commands:
            commands["apps"] = {"code": 0, "out": self.apps, "err": ""}
        tool = "/usr/bin/nvidia-smi" if self.apps is not None else None
        return {
            "time": 1.0, "machine": "aarch64", "kernel": "6", "commands": commands, "ports": {},
            "files": dict.fromkeys(fields.get("files", ())), "tools": {"nvidia-smi": tool},
            "disks": {path: {"error": "none"} for path in fields.get("disks", ())},
            "docker": {page: self.page(page) for page in fields.get("docker", ())},
        }  # fmt: skip

    def page(self, page: str) -> dict[str, Any]:
        if page == "/info":
            return {"status": 200, "body": {"ServerVersion": "28"}}
        if page == "/containers/json":
            return {"status": 200, "body": [one["row"] for one in self.boxes.values()]}
        if page == "/images/i/json":
            return {"status": 200, "body": {"Id": "i", "Config": {}, "RootFS": {}}}
        return {"status": 200, "body": {"Processes": []} if "/top?" in page else self.boxes[page]["body"]}

    def close(self) -> None:
        """Nothing to end."""


INFINIBAND = [{"PathOnHost": "/dev/infiniband/uverbs0", "PathInContainer": "/dev/infiniband/uverbs0"}]


@pytest.mark.parametrize(
    ("engine", "ours", "theirs"),
    [
        (Engine(), False, ()),
        (Engine(box("web")), False, ()),
        (Engine(box("rank", "host", ours=True), apps="7, vllm\n"), True, ("vllm (process 7)",)),
        (Engine(box("tf-head", "host")), False, ("tf-head",)),
        (Engine(box("tf-head", Devices=INFINIBAND)), False, ("tf-head",)),
        (Engine(box("tf-head", Privileged=True)), False, ("tf-head",)),
        (Engine(apps="7, python3\n"), False, ("python3 (process 7)",)),
        (Engine(apps=""), False, ()),
        (Engine(apps="No devices were found"), False, ("a process that nvidia-smi does not tell of",)),
    ],
)
def test_who_may_use_the_cable(engine: Engine, ours: bool, theirs: tuple[str, ...]) -> None:
    node = Node("head", LocalHost("head"), Settings())
    node.__dict__["session"] = engine
    assert link_proof.see_users(node) == (ours, list(theirs))


def test_a_pair_of_others_is_never_measured_beside(cluster: Cluster) -> None:
    cluster.worker.__dict__["session"] = Engine(box("tf-worker", "host"))
    checks = link_proof.prove(cluster, links(), master_port=free_port(), is_idle=lambda: True)
    assert verdicts(checks) == [*PROVED, *LEFT_OUT]
    assert checks[-1].observed == "not measured: tf-worker may use the cable, and is not disturbed"


SILENT = SparkserveError("node_silent", "gave no answer to `x`", "wait a minute", "worker", exit_code=6)


@pytest.mark.parametrize(
    ("broken", "found", "unseen"),
    [
        (("_open_ends", ""), [], ["link_mtu_path", "link_tcp", "link_bandwidth", "link_rdma_bandwidth"]),
        (("prove_frames", "head"), PROVED[:1], ["link_mtu_path", "link_tcp", "link_bandwidth", "link_rdma_bandwidth"]),
        (("prove_tcp", ""), PROVED[:2], ["link_tcp", "link_bandwidth", "link_rdma_bandwidth"]),
        (("prove_tcp", "head"), PROVED[:3], ["link_tcp", "link_bandwidth", "link_rdma_bandwidth"]),
        (("prove_bandwidth", "head"), [*PROVED, CARRIED[0]], ["link_bandwidth", "link_rdma_bandwidth"]),
        (("prove_rdma", ""), [*PROVED, *CARRIED], ["link_rdma_bandwidth"]),
    ],
)
def test_a_proof_that_breaks_off_keeps_what_was_seen(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, str], found: list[Any], unseen: list[str]
) -> None:
    step, node = broken
    whole = getattr(link_proof, step)

    def breaks(*given: Any) -> Any:
        if isinstance(given[0], End) and given[0].role == node:
            return whole(*given)
        raise SILENT

    monkeypatch.setattr(link_proof, step, breaks)
    checks = link_proof.prove(cluster, links(), master_port=free_port(), floor=0.1, is_idle=lambda: True)
    assert verdicts(checks) == [*found, *((name, "worker", "unseen") for name in unseen)]
    assert {check.observed for check in checks[len(found) :]} == {str(SILENT)}
    assert checks[-1].advice == "wait a minute"


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
    assert program.wait(60) == 0
    pid = int(child.read_text())
    wait_for(
        lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes(), "its end"
    )


def test_a_tool_that_has_no_end(program: subprocess.Popen[bytes]) -> None:
    ask(program, "run", argv=["sleep", "60"], seconds=0.1)
    assert program.stdout is not None
    assert json.loads(program.stdout.readline()) == {"id": 1, "result": None}
