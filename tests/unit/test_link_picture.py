"""The picture of the cable, to the character, and what is odd about it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace

import pytest

from sparkserve.cluster import Role
from sparkserve.link import Interface, LinkFacts, Management, find_management, parse
from sparkserve.link_oddities import find_oddities
from sparkserve.link_picture import draw, port_name
from tests.unit.cases import CASES, ROOT

GOLDEN = ROOT / "tests" / "golden" / "link"
UPDATE = "UPDATE_GOLDEN=1 python -m pytest tests/unit/test_link_picture.py"
NAMES: dict[Role, str] = {"head": "spark-1", "worker": "spark-2"}
PICTURES = {
    "crossed": ("head_port1", "worker_port0_index5"),
    "one_half": ("head_port1", "twin_link_local"),
    "unset": ("nobody", "unset"),
    "wrong": ("wifi", "port_down"),
    "no_rdma": ("no_rdma", "worker_port0_index5"),
}


# What sets the addresses of a worker apart, where a case was written as a head's.
WORKERS_OWN = {"192.168.1.20": "192.168.1.22", "10.100.8.1": "10.100.8.2", "10.100.9.1": "10.100.9.2"}
WORKERS_OWN |= {"0a64:0801": "0a64:0802", "0a64:0901": "0a64:0902"}


def seen(head: str, worker: str) -> dict[Role, LinkFacts]:
    found: dict[Role, LinkFacts] = {}
    names: dict[Role, str] = {"head": head, "worker": worker}
    for role, name in names.items():
        text = (CASES / "link" / f"{name}.json").read_text(encoding="utf-8")
        for old, new in WORKERS_OWN.items() if role == "worker" else ():
            text = text.replace(old, new)
        case = json.loads(text)
        facts = parse(case["raw"], case["address"])
        found[role] = replace(facts, ssh=("192.168.1.20", "192.168.1.22"), default_routes=("enP7s7",))
    return found


def told(links: dict[Role, LinkFacts], *, plain: bool = False) -> str:
    management = find_management(links)
    lines = [f"  - {line}" for line in find_oddities(links, management)]
    return "\n".join([draw(NAMES, links, management, plain=plain), "", *lines, ""])


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("plain", [False, True], ids=["boxes", "ascii"])
def test_picture(name: str, plain: bool) -> None:
    text = told(seen(*PICTURES[name]), plain=plain)
    golden = GOLDEN / f"{name}.{'ascii' if plain else 'boxes'}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert golden.exists(), f"no golden file: {UPDATE}"
    assert text == golden.read_text(encoding="utf-8"), UPDATE
    assert plain is text.isascii()
    box = text.partition("\n\n")[0].splitlines()
    assert {len(line) for line in box} == {100}


def test_the_document_shows_the_pictures_of_the_code() -> None:
    document = ROOT / "docs" / "network.md"
    text = document.read_text(encoding="utf-8")
    block = r"<!-- picture: (\w+) -->\n```\n.*?```"
    names = re.findall(block, text, re.DOTALL)
    assert len(names) >= 2

    def drawn(match: re.Match[str]) -> str:
        return f"<!-- picture: {match[1]} -->\n```\n{told(seen(*PICTURES[match[1]]))}```"

    wanted = re.sub(block, drawn, text, flags=re.DOTALL)
    if os.environ.get("UPDATE_GOLDEN"):
        document.write_text(wanted, encoding="utf-8")
    assert document.read_text(encoding="utf-8") == wanted, UPDATE


def test_long_names_stay_inside_the_box() -> None:
    links = seen("head_port1", "worker_port0_index5")
    long = "a-host-name-that-somebody-found-a-good-idea-at-the-time.example.com"
    text = draw({"head": long, "worker": long}, links, find_management(links), plain=False)
    assert {len(line) for line in text.partition("\n\n")[0].splitlines()} == {100}
    assert "…" in text


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.parametrize("width", [40, 60, 76, 80, 99, 100, 200])
def test_a_terminal_of_any_width_shows_all_of_it(name: str, width: int) -> None:
    links = seen(*PICTURES[name])
    text = draw(NAMES, links, find_management(links), plain=False, width=width)
    box = text.partition("\n\n")[0].splitlines()
    if width < 76:
        assert not set("┌│└") & set(text)
    else:
        assert {len(line) for line in box} == {min(width, 100) // 2 * 2}
    assert "…" not in text
    wide = draw(NAMES, links, find_management(links), plain=False)
    words = [set(re.findall(r"[\w.]+", drawn.partition("\n\n")[0])) for drawn in (text, wide)]
    assert words[0] == words[1]


@pytest.mark.parametrize(
    ("interface", "port"),
    [("enp1s0f1np1", "port 1"), ("enP2p1s0f0np0", "port 0"), ("enp1s0f1", "port 1"), ("enP7s7", ""), ("wlP9s9", "")],
)
def test_the_port_of_an_interface(interface: str, port: str) -> None:
    assert port_name(interface) == port


def odd(**changes: object) -> str:
    links = seen("head_port1", "worker_port0_index5")
    links["head"] = replace(links["head"], **changes)  # type: ignore[arg-type]
    return "\n".join(find_oddities(links, find_management(links)))


OWN = Interface("enp1s0f1np1", ("10.100.8.1",), 9000, up=True, speed_mbps=200_000, networks=("10.100.8.0/24",))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mtu": 1500}, "the MTU is 1500 on the head and 9000 on the worker"),
        ({"mtu": 1500}, "head: MTU 1500; 9000 moves more"),
        ({"speed_mbps": 1000}, "the head says 1 Gb/s and the worker 200"),
        ({"default_routes": ("enp1s0f1np1",)}, "head: the default route goes over the cable"),
        ({"address": "169.254.3.4"}, "head: 169.254.3.4 is link-local"),
        ({"gid_index": None}, "head: enp1s0f1np1 has no RoCE v2 GID of 10.100.8.1"),
        ({"hcas": ("rocep1s0f1",), "twin": ""}, "one half of the port is used, which is half of its rate: the other"),
        ({"hcas": ("rocep1s0f1",)}, "half of its rate: enP2p1s0f1np1 has no GID at the same index"),
        ({"address": "10.100.8.2"}, "both link addresses are the same"),
        ({"interfaces": (replace(OWN, networks=("10.9.0.0/16",)),), "twin": ""}, "are in different networks"),
        ({"interfaces": (OWN, replace(OWN, name="enP7s7")), "twin": ""}, "enP7s7 is in the network of enp1s0f1np1"),
        ({"interface": "", "address": ""}, "head: its link address is not set"),
    ],
)  # fmt: skip
def test_what_is_odd(changes: dict[str, object], expected: str) -> None:
    assert expected in odd(**changes)
    assert expected not in odd()


def test_ssh_over_the_cable() -> None:
    links = seen("head_port1", "worker_port0_index5")
    home = Management("enp1s0f1np1", "10.100.8.1")
    assert "head: SSH goes over the cable as well" in find_oddities(links, {**find_management(links), "head": home})
