"""The cable of the lab: drawn, proved, and every way in which it can be wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.e2e.load import fill_every_slot
from tests.lab.machine import wait_until
from tests.lab.node import LabNode
from tests.lab.pair import SOURCE, Pair

lab = pytest.mark.lab
faults = pytest.mark.faults
Verdicts = dict[tuple[str, str], str]
MASTER = "29551"
# A lab that shares its machine with others carries less than a cable.
PROVE = ("link", "--prove", "--floor", "0.5")


def prove(pair: Pair, *words: str) -> tuple[dict[str, Any], Verdicts]:
    """Prove the cable and give the whole answer, and the verdicts by proof and node."""
    answer = pair.ask(*(words or PROVE))
    return answer, {(row["id"], row["node"]): row["verdict"] for row in answer["data"]["checks"]}


def observed(answer: dict[str, Any], name: str, node: str) -> dict[str, str]:
    (row,) = [row for row in answer["data"]["checks"] if (row["id"], row["node"]) == (name, node)]
    found: dict[str, str] = row
    return found


@contextmanager
def changed(node: LabNode, do: list[str], undo: list[str]) -> Iterator[None]:
    """Change something of a node's network as root, and change it back."""
    node.run(["sh", "-ec", "\n".join(do)], user="root")
    try:
        yield
    finally:
        node.run(["sh", "-c", "\n".join(undo)], user="root")


WELL: Verdicts = {
    ("link_mtu_path", "head"): "ok",
    ("link_mtu_path", "worker"): "ok",
    ("link_tcp", "head"): "ok",
    ("link_tcp", "worker"): "ok",
}
CARRIES: Verdicts = {("link_bandwidth", "head"): "ok", ("link_bandwidth", "worker"): "ok"}
NO_PERFTEST: Verdicts = {("link_rdma_bandwidth", ""): "warn"}


# -- a cable in order -------------------------------------------------------------------------------------------------


@lab
def test_a_crossed_cable_is_drawn_and_proved(pair: Pair) -> None:
    answer, verdicts = prove(pair)
    assert (answer["exit_code"], verdicts) == (0, WELL | CARRIES | NO_PERFTEST)
    for node in pair.lab.nodes:
        facts = answer["data"]["links"][node.name]
        assert (facts["interface"], facts["twin"]) == (node.link_interface, node.twin_interface)
        assert facts["hcas"] == [port.rdma_device for port in node.role.ports if port.cabled]
        assert facts["gid_index"] == node.role.gid_index
        management = {"interface": node.management_interface, "address": node.management_address}
        assert answer["data"]["management"][node.name] == management
    assert answer["data"]["odd"] == []


@lab
def test_a_person_sees_a_picture(pair: Pair) -> None:
    drawn = pair.sparkserve("link", env={"LC_ALL": "C.UTF-8"})
    plain = pair.sparkserve("link", env={"PYTHONIOENCODING": "ascii"})
    assert (drawn.returncode, plain.returncode) == (0, 0)
    for text, joint in ((drawn.stdout.decode(), "╞══════╡"), (plain.stdout.decode("ascii"), "+======+")):
        head, worker = pair.lab.nodes
        (line,) = [line for line in text.splitlines() if f"{head.link_interface}  {head.link_address}" in line]
        assert joint in line
        assert f"{worker.link_interface}  {worker.link_address}" in line
        assert max(len(line) for line in text.splitlines()) <= 100


@lab
def test_an_owner_who_named_no_cable_is_told_the_choice(pair: Pair) -> None:
    pair.write_settings(SPARKSERVE_HEAD_LINK=None, SPARKSERVE_WORKER_LINK=None)
    answer = pair.ask("link")
    first, second = answer["data"]["proposals"]
    assert (first["head_address"], first["worker_address"]) == (pair.head.link_address, pair.worker.link_address)
    assert (second["head_address"], second["worker_address"]) == (pair.head.twin_address, pair.worker.twin_address)
    text = pair.sparkserve("link").stdout.decode()
    assert f"SPARKSERVE_HEAD_LINK={pair.head.link_address}\n" in text


# The program's own command line, halted where both ends listen.
HALTED = """
import signal
from sparkserve import cli, link_proof
link_proof.prove_tcp = lambda *_: signal.pause()
cli.main(["link", "--prove"])
"""


@lab
def test_the_launcher_is_killed_and_nothing_listens(pair: Pair) -> None:
    idle = {node.name: open_ports(node) for node in pair.lab.nodes}
    with pair.head.popen([SOURCE / ".venv/bin/python", "-c", HALTED]) as launcher:
        try:
            wait_until(lambda: all(open_ports(node) == idle[node.name] + 2 for node in pair.lab.nodes), "two ends", 20)
        finally:
            launcher.kill()
    wait_until(lambda: {node.name: open_ports(node) for node in pair.lab.nodes} == idle, "an end of both", 10)


def open_ports(node: LabNode) -> int:
    return len(node.run(["ss", "-Hltn", "src", node.link_address]).stdout.splitlines())


# -- a pair that serves -----------------------------------------------------------------------------------------------


@faults
def test_a_serving_pair_is_proved_when_idle_and_left_alone_when_busy(serving: Pair) -> None:
    answer, verdicts = prove(serving)
    assert verdicts == WELL | CARRIES | NO_PERFTEST
    assert observed_all(answer, "link_tcp", "head")[0] == f"port {MASTER} (rendezvous) is held by ours"
    ended = threading.Event()
    work = threading.Thread(target=fill_every_slot, args=(serving, ended))
    work.start()
    try:
        wait_until(lambda: serving.ask("status")["data"]["requests_running"], "requests", 30)
        answer, verdicts = prove(serving)
    finally:
        ended.set()
        work.join()
    assert verdicts == WELL | {("link_bandwidth", ""): "unseen", ("link_rdma_bandwidth", ""): "unseen"}
    assert answer["exit_code"] == 6
    assert "not measured: a pair of ours runs" in observed(answer, "link_bandwidth", "")["observed"]


def observed_all(answer: dict[str, Any], name: str, node: str) -> list[str]:
    return [row["observed"] for row in answer["data"]["checks"] if (row["id"], row["node"]) == (name, node)]


# -- faults -----------------------------------------------------------------------------------------------------------


@faults
def test_the_default_route_has_no_say(pair: Pair) -> None:
    head, gateway = pair.head, pair.lab.gateway_address
    before = pair.ask("link")["data"]
    third = ["ip link add third type veth peer name fourth", "ip address add 10.31.0.1/24 dev third"]
    do = [*third, "ip link set third up", "ip link set fourth up", "ip route replace default dev third"]
    undo = ["ip link delete third", f"ip route replace default via {gateway}"]
    with changed(head, do, undo):
        over_third = pair.ask("link")["data"]
        pair.write_settings(SPARKSERVE_HEAD_LINK=None, SPARKSERVE_WORKER_LINK=None)
        proposals = pair.ask("link")["data"]["proposals"]
        pair.write_settings()
        head.run(["ip", "route", "del", "default"], user="root")
        without, verdicts = prove(pair)
    assert over_third["links"]["head"]["default_routes"] == ["third"]
    assert without["data"]["links"]["head"]["default_routes"] == []
    for found in (over_third, without["data"]):
        for name in ("interface", "twin", "hcas", "gid_index"):
            assert found["links"]["head"][name] == before["links"]["head"][name]
        assert found["management"] == before["management"]
    assert proposals[0]["head_interface"] == head.link_interface
    assert verdicts == WELL | CARRIES | NO_PERFTEST


@faults
@pytest.mark.parametrize("role", ["head", "worker"])
def test_an_mtu_that_differs(pair: Pair, role: str) -> None:
    node: LabNode = getattr(pair, role)
    other = "worker" if role == "head" else "head"
    ip = f"ip link set {node.link_interface} mtu"
    with changed(node, [f"{ip} 1500"], [f"{ip} 9000"]):
        answer, verdicts = prove(pair)
    assert answer["exit_code"] == 1
    assert (verdicts["link_mtu_path", other], verdicts["link_mtu_path", role]) == ("fail", "ok")
    assert "frames of 9000 bytes do not reach" in observed(answer, "link_mtu_path", other)["observed"]
    sizes = {role: 1500, other: 9000}
    (odd,) = answer["data"]["odd"]
    assert (odd["id"], odd["verdict"]) == ("link_mtu", "fail")
    assert odd["observed"] == f"MTU: head {sizes['head']}, worker {sizes['worker']}"


@faults
@pytest.mark.parametrize("role", ["head", "worker"])
def test_a_firewall_drops_high_ports(pair: Pair, role: str) -> None:
    node: LabNode = getattr(pair, role)
    other = "worker" if role == "head" else "head"
    # Those that the ranks meet on are let in, as somebody does who reads about them; NCCL's own are not.
    rule = f"INPUT -i {node.link_interface} -p tcp --syn --dport 30000:65535 -j DROP"
    with changed(node, [f"iptables -A {rule}"], [f"iptables -D {rule}"]):
        answer, verdicts = prove(pair)
    row = observed(answer, "link_tcp", other)
    assert (answer["exit_code"], row["verdict"]) == (1, "fail")
    assert "(a random high one): no answer" in row["observed"]
    assert MASTER not in row["observed"]
    assert f"on the {role}: `sudo ufw allow in on {node.link_interface}`" in row["hint"]
    assert verdicts["link_tcp", role] == "ok"
    assert observed(answer, "link_bandwidth", "")["observed"] == "not measured: TCP does not come through"


@faults
def test_a_firewall_drops_everything(pair: Pair) -> None:
    rule = f"INPUT -i {pair.worker.link_interface} -j DROP"
    with changed(pair.worker, [f"iptables -A {rule}"], [f"iptables -D {rule}"]):
        answer, verdicts = prove(pair)
    assert verdicts["link_mtu_path", "head"] == "fail"
    assert observed(answer, "link_mtu_path", "head")["observed"] == "no datagram reaches the worker (no answer)"
    assert (verdicts["link_tcp", "head"], verdicts["link_tcp", "worker"]) == ("fail", "fail")


@faults
def test_a_cable_that_fell_to_one_gigabit(pair: Pair) -> None:
    device = f"dev {pair.head.link_interface} root"
    limit = f"tc qdisc add {device} tbf rate 1gbit burst 1mb latency 50ms"
    with changed(pair.head, [limit], [f"tc qdisc del {device}"]):
        answer, _ = prove(pair, "link", "--prove")
        mild, _ = prove(pair)
    row = observed(answer, "link_bandwidth", "head")
    assert (answer["exit_code"], row["verdict"]) == (1, "fail")
    assert 0.5 < float(row["observed"].split()[0]) < 1.5
    assert row["needed"] == "5 Gb/s; the port says 200"
    assert mild["exit_code"] == 0


@faults
def test_a_gid_that_moved_and_one_that_is_gone(pair: Pair) -> None:
    """Reported of real pairs: the index moves within the hour, and the table then has a hole."""
    devices, copy = "/sys/class/infiniband", "/run/rdma"
    old, nothing = pair.head.role.gid_index, ":".join(["0000"] * 8)
    move, clear = [], []
    for port in pair.head.role.ports[:2]:
        path = f"{devices}/{port.rdma_device}/ports/1"
        move += [f"cat {path}/gids/{old} > {path}/gids/7", f"echo {nothing} > {path}/gids/{old}"]
        move += [f"echo RoCE v2 > {path}/gid_attrs/types/7", f"echo {port.interface} > {path}/gid_attrs/ndevs/7"]
        clear.append(f"echo {nothing} > {path}/gids/7")
    over = [f"cp -r {devices} {copy}", f"mount --bind {copy} {devices}", *move]
    with changed(pair.head, over, [f"umount {devices}", f"rm -r {copy}"]):
        moved = pair.ask("link")["data"]
        with changed(pair.head, clear, []):
            gone = pair.ask("link")["data"]
    after = pair.ask("link")["data"]
    indices = [found["links"]["head"]["gid_index"] for found in (moved, gone, after)]
    assert indices == [7, None, old]
    assert len(moved["links"]["head"]["hcas"]) == 2
    assert moved["links"]["worker"]["gid_index"] == pair.worker.role.gid_index
    assert [(row["id"], row["node"], row["verdict"]) for row in gone["odd"]] == [("link_rdma", "head", "fail")]
