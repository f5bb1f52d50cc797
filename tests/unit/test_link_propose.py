"""Which interfaces may be the cable where nobody said so, and where SSH goes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sparkserve.cluster import Role
from sparkserve.errors import SparkserveError
from sparkserve.link import (
    Interface,
    LinkFacts,
    Management,
    Proposal,
    find_management,
    parse,
    parse_interfaces,
    propose,
)
from sparkserve.link_rdma import RDMA_GLOBS, RdmaDevice
from tests.unit.cases import CASES, read_case

EMPTY = LinkFacts()


def port(name: str, address: str, **changes: object) -> Interface:
    network = f"{address.rpartition('.')[0]}.0/24"
    found = Interface(name, (address,), 9000, up=True, speed_mbps=200_000, networks=(network,))
    return replace(found, **changes)  # type: ignore[arg-type]


def node(*interfaces: Interface, rdma: tuple[str, ...] = (), default: tuple[str, ...] = ()) -> LinkFacts:
    devices = tuple(RdmaDevice(f"roce-{name}", name, active=True, gids=()) for name in rdma)
    return replace(EMPTY, interfaces=interfaces, devices=devices, default_routes=default)


def pairs(head: LinkFacts, worker: LinkFacts) -> list[tuple[str, str]]:
    return [(one.head_interface, one.worker_interface) for one in propose({"head": head, "worker": worker})]


def test_both_halves_of_a_crossed_cable_the_first_half_first() -> None:
    seen: dict[Role, LinkFacts] = {
        "head": case("head_port1"),
        "worker": case("worker_port0_index5"),
    }
    first, second = propose(seen)
    assert first == Proposal(
        "10.100.8.1", "10.100.8.2", "enp1s0f1np1", "enp1s0f0np0", 9000, 200_000, rdma=True,
        why="both in 10.100.8.0/24, RDMA on both, 200 Gb/s, MTU 9000",
    )  # fmt: skip
    assert (second.head_interface, second.worker_interface) == ("enP2p1s0f1np1", "enP2p1s0f0np0")


def case(name: str, address: str = "") -> LinkFacts:
    return parse(read_case(CASES / "link" / f"{name}.json")["raw"], address)


OTHER = port("enp1s0f0np0", "10.0.0.2")


@pytest.mark.parametrize(
    "unfit",
    [
        port("enp1s0f1np1", "10.0.0.1", up=False),
        port("enp1s0f1np1", "10.0.0.1", soft=True),
        port("enp1s0f1np1", "10.0.0.1", wireless=True),
        port("enp1s0f1np1", "10.0.1.1"),
        port("enp1s0f1np1", "10.0.0.2"),
        Interface("enp1s0f1np1", (), 9000, up=True, speed_mbps=None),
    ],
    ids=["down", "made of software", "wireless", "another network", "the same address", "no address"],
)
def test_what_is_no_end_of_the_cable(unfit: Interface) -> None:
    assert pairs(node(port("enp1s0f1np1", "10.0.0.1")), node(OTHER)) == [("enp1s0f1np1", "enp1s0f0np0")]
    assert pairs(node(unfit), node(OTHER)) == []
    assert pairs(node(OTHER), node(unfit)) == []


@pytest.mark.parametrize("role", ["head", "worker"])
def test_never_the_default_route(role: str) -> None:
    ends = {"head": node(port("a", "10.0.0.1")), "worker": node(port("b", "10.0.0.2"))}
    ends[role] = replace(ends[role], default_routes=("c", "a" if role == "head" else "b"))
    assert pairs(ends["head"], ends["worker"]) == []


def test_rdma_before_speed_before_mtu() -> None:
    def end(number: int) -> LinkFacts:
        return node(
            port("small", f"10.0.1.{number}", mtu=1500),
            port("jumbo", f"10.0.2.{number}"),
            port("unknown", f"10.0.3.{number}", speed_mbps=None),
            port("slow", f"10.0.4.{number}", speed_mbps=1000),
            port("rdma", f"10.0.5.{number}", speed_mbps=100_000),
            rdma=("rdma", "slow") if number == 1 else ("rdma",),
        )

    assert [head for head, _ in pairs(end(1), end(2))] == ["rdma", "jumbo", "small", "slow", "unknown"]


def test_the_slower_end_and_the_smaller_mtu_count() -> None:
    worker = port("b", "10.0.0.2", mtu=1500, speed_mbps=10_000)
    (found,) = propose({"head": node(port("a", "10.0.0.1")), "worker": node(worker)})
    assert (found.mtu, found.speed_mbps, found.rdma) == (1500, 10_000, False)
    assert found.why == "both in 10.0.0.0/24, no RDMA, 10 Gb/s, MTU 1500"


def local(name: str, address: str) -> Interface:
    return port(name, address, networks=("169.254.0.0/16",))


def test_link_local_only_when_there_is_nothing_else() -> None:
    head = node(local("enp1s0f1np1", "169.254.1.1"), local("enP2p1s0f1np1", "169.254.1.2"))
    worker = node(local("enp1s0f1np1", "169.254.2.1"), local("enP2p1s0f1np1", "169.254.2.2"))
    first, second, *rest = propose({"head": head, "worker": worker})
    assert (first.head_interface, first.worker_interface) == ("enp1s0f1np1", "enp1s0f1np1")
    assert (second.head_interface, second.worker_interface) == ("enP2p1s0f1np1", "enP2p1s0f1np1")
    assert len(rest) == 2
    assert first.why.endswith("link-local, which may change at any boot")
    fixed = [replace(end, interfaces=(*end.interfaces, port("slow", address, speed_mbps=1000)))
             for end, address in ((head, "10.0.0.1"), (worker, "10.0.0.2"))]  # fmt: skip
    assert pairs(*fixed) == [("slow", "slow")]


CABLE, LAN = "enp1s0f1np1", "enP7s7"


def dressed(
    number: int, *ports: Interface, rdma: tuple[str, ...] = (CABLE,), default: tuple[str, ...] = ()
) -> LinkFacts:
    """Give a node whose cable has a link-local address, as NVIDIA's guide sets it up, with other ports beside."""
    return node(local(CABLE, f"169.254.{number}.1"), *ports, rdma=rdma, default=default)


@pytest.mark.parametrize(
    ("ports", "rdma", "default", "needs_rdma", "found"),
    [
        ({LAN: "192.168.1"}, (CABLE,), (), False, [CABLE, LAN]),
        ({LAN: "192.168.1"}, (CABLE,), (), True, [CABLE]),
        ({LAN: "192.168.1"}, (CABLE,), (LAN,), True, [CABLE]),
        ({LAN: "192.168.1"}, (), (), False, [LAN]),
        ({LAN: "192.168.1"}, (), (), True, []),
        ({"enp1s0f0np0": "10.100.8"}, (CABLE, "enp1s0f0np0"), (), False, ["enp1s0f0np0"]),
        ({"enp1s0f0np0": "10.100.8"}, ("enp1s0f0np0",), (), False, ["enp1s0f0np0"]),
    ],
    ids=["beside a LAN", "and RDMA wanted", "and a default route", "no RDMA", "none, but wanted",
         "beside another cable", "less than a cable"],
)  # fmt: skip
def test_a_link_local_cable_gives_way_to_no_lesser_network(
    ports: dict[str, str], rdma: tuple[str, ...], default: tuple[str, ...], needs_rdma: bool, found: list[str]
) -> None:
    head, worker = (
        dressed(number, *(port(name, f"{net}.{number}") for name, net in ports.items()), rdma=rdma, default=default)
        for number in (1, 2)
    )
    proposed = propose({"head": head, "worker": worker}, needs_rdma=needs_rdma)
    assert [(one.head_interface, one.worker_interface) for one in proposed] == [(name, name) for name in found]


def row(name: str, **more: object) -> dict[str, object]:
    return {"ifname": name, "mtu": 1500, "flags": ["LOWER_UP"], "addr_info": [], **more}


@pytest.mark.parametrize(
    ("found", "soft", "wireless"),
    [
        (row("enp1s0f1np1"), False, False),
        (row("enp1s0f1np1", linkinfo={"info_kind": "veth"}), False, False),
        (row("enp1s0f1np1", master="br0"), True, False),
        (row("docker0", linkinfo={"info_kind": "bridge"}), True, False),
        (row("lan", linkinfo={"info_kind": "bridge"}), True, False),
        (row("veth12ab"), True, False),
        (row("tailscale0", linkinfo={"info_kind": "tun"}), True, False),
        (row("wlP9s9"), False, True),
        (row("radio"), False, True),
    ],
    ids=lambda value: value["ifname"] if isinstance(value, dict) else "",
)
def test_what_an_interface_is(found: dict[str, object], soft: bool, wireless: bool) -> None:
    globs: dict[str, Any] = {name: {} for name in RDMA_GLOBS} | {
        "speed": {},
        "wireless": {"/sys/class/net/radio/phy80211": ""},
    }
    (interface,) = parse_interfaces({"code": 0, "out": json.dumps([found]), "err": ""}, globs)
    assert (interface.soft, interface.wireless) == (soft, wireless)


def with_answer(name: str, answer: dict[str, Any] | None) -> LinkFacts:
    raw = read_case(CASES / "link" / "worker_port0_index5.json")["raw"]
    return parse({**raw, "commands": {**raw["commands"], name: answer}}, "10.100.8.2")


def with_ssh(words: str, code: int = 0) -> LinkFacts:
    return with_answer("ssh", {"code": code, "out": words, "err": ""})


@pytest.mark.parametrize(
    ("text", "found"), [("", ()), ("[]\n", ()), ('[{"dev": "a"}, {"dev": "b"}, {"dev": "a"}]', ("a", "b"))]
)
def test_default_routes(text: str, found: tuple[str, ...]) -> None:
    assert with_answer("routes", {"code": 0, "out": text, "err": ""}).default_routes == found


@pytest.mark.parametrize(
    "answer", [None, {"code": 1, "out": "", "err": "no"}, {"code": 0, "out": "default via", "err": ""}]
)
def test_default_routes_that_cannot_be_seen_are_not_none(answer: dict[str, Any] | None) -> None:
    with pytest.raises(SparkserveError, match="`ip -json route show default` gave no answer"):
        with_answer("routes", answer)


def test_where_ssh_goes() -> None:
    worker = with_ssh("192.168.1.20 50122 192.168.1.20 22\n")
    assert worker.default_routes == ("enP7s7",)
    found = find_management({"head": case("head_port1"), "worker": worker})
    assert found == {role: Management("enP7s7", "192.168.1.20") for role in ("head", "worker")}


@pytest.mark.parametrize(("words", "code"), [("", 1), ("192.168.99.1 5 192.168.99.2 22", 0), ("not four", 0)])
def test_where_ssh_goes_is_not_guessed(words: str, code: int) -> None:
    found = find_management({"head": case("head_port1"), "worker": with_ssh(words, code)})
    assert set(found.values()) == {Management("", "")}


def test_what_the_cable_should_give() -> None:
    raw = read_case(CASES / "link" / "head_port1.json")["raw"]
    assert parse(raw, "10.100.8.1").cable_mbps == 200_000
    rates = {"/sys/class/infiniband/rocep1s0f1/ports/1/rate": "100 Gb/sec (2X HDR)\n",
             "/sys/class/infiniband/rocep1s0f0/ports/1/rate": "40 Gb/sec (4X QDR)\n"}  # fmt: skip
    raw = {**raw, "globs": {**raw["globs"], RDMA_GLOBS["rate"]: rates}}
    assert parse(raw, "10.100.8.1").cable_mbps == 100_000
    assert case("no_rdma", "10.100.8.1").cable_mbps == 200_000
