"""The picture of the cable, to the character, and what is odd about it."""

from __future__ import annotations

import io
import json
import os
import re
from dataclasses import replace

import pytest
from rich.console import Console

from sparkserve.checks import Check, Subject
from sparkserve.cluster import Role
from sparkserve.doctor_tables import checks_view
from sparkserve.link import LinkFacts, find_management, parse
from sparkserve.link_picture import draw, port_name
from sparkserve.pair_checks import check_link
from tests.unit.cases import CASES, ROOT
from tests.unit.facts import make_subject

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


def odd(links: dict[Role, LinkFacts]) -> list[Check]:
    subject = make_subject()
    return [
        check for check in check_link(Subject(subject.settings, subject.recipe, {}, links)) if check.verdict != "ok"
    ]


def told(links: dict[Role, LinkFacts], *, plain: bool = False) -> str:
    """Give what a terminal of 120 columns shows."""
    console = Console(file=io.StringIO(), width=120, emoji=False)
    for part in checks_view(odd(links)):
        console.print(part, soft_wrap=isinstance(part, str))
    below = [line.rstrip() for line in console.file.getvalue().rstrip().splitlines()]  # type: ignore[attr-defined]
    return "\n".join([draw(NAMES, links, find_management(links), plain=plain), *([""] * bool(below)), *below, ""])


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
