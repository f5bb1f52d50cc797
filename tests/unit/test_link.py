from __future__ import annotations

import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sparkserve.checks import Check, Subject
from sparkserve.cluster import Role
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError
from sparkserve.link import LinkFacts, parse
from sparkserve.link_rdma import RDMA_GLOBS
from sparkserve.pair_checks import check_link
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from tests.unit.cases import CASES, case_files, read_case

EMPTY_GLOBS: dict[str, dict[str, str]] = {
    pattern: {} for pattern in read_case(CASES / "link" / "no_rdma.json")["raw"]["globs"]
}


def facts(name: str) -> LinkFacts:
    case = read_case(CASES / "link" / f"{name}.json")
    return parse(case["raw"], case["address"])


@pytest.mark.parametrize("path", case_files("link"), ids=lambda path: path.stem)
def test_link(path: Path) -> None:
    case = read_case(path)
    found = asdict(parse(case["raw"], case["address"]))
    shown: dict[str, Any] = {name: found[name] for name in case["facts"]}
    assert {**shown, "hcas": list(shown["hcas"])} == case["facts"]
    assert "lo" not in [item["name"] for item in found["interfaces"]]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"code": 1, "out": "", "err": "Option -json is unknown"},
        {"code": 0, "out": "", "err": ""},
        {"code": 0, "out": "1: lo: <LOOPBACK>", "err": ""},
    ],
)
def test_could_not_look_is_not_none(answer: dict[str, Any] | None) -> None:
    with pytest.raises(SparkserveError, match="cannot see the network interfaces") as caught:
        parse({"commands": {"ip": answer}, "globs": EMPTY_GLOBS}, "10.0.0.1")
    assert (caught.value.code, caught.value.exit_code) == ("link_unseen", EXIT_COULD_NOT_LOOK)


def failed(head: LinkFacts, worker: LinkFacts, *, rdma: bool = True) -> dict[tuple[str, str], Check]:
    recipe = load_recipe("tensorfold-1017")
    if not rdma:
        recipe = recipe.model_copy(update={"container": recipe.container.model_copy(update={"devices": ()})})
    found = judged({"head": head, "worker": worker}, recipe)
    return {(check.id, check.node): check for check in found if check.verdict == "fail"}


def judged(links: dict[Role, LinkFacts], recipe: Recipe | None = None) -> list[Check]:
    return check_link(Subject(Settings(), recipe or load_recipe("tensorfold-1017"), {}, links))


OVER_WIFI = {("link_kind", "worker"), ("link_network", ""), ("link_mtu", "")}


def test_a_crossed_pair_is_well() -> None:
    assert failed(facts("head_port1"), facts("worker_port0_index5")) == {}


def test_what_cannot_do_rdma_is_named_only_where_it_is_wanted() -> None:
    found = failed(facts("head_port1"), facts("wifi"), rdma=True)
    assert set(found) == {("link_rdma", "worker"), *OVER_WIFI}
    assert "wlP9s9" in found["link_rdma", "worker"].observed
    assert failed(facts("no_rdma"), facts("worker_port0_index5"), rdma=False) == {}


ROCE = "/sys/class/infiniband/rocep1s0f1/ports/1"


@pytest.mark.parametrize(
    ("pattern", "file"),
    [("state", f"{ROCE}/state"), ("gid", f"{ROCE}/gids/3"), ("type", f"{ROCE}/gid_attrs/types/3")],
)
def test_an_rdma_file_that_cannot_be_read_is_could_not_look(pattern: str, file: str) -> None:
    raw = copy.deepcopy(read_case(CASES / "link" / "head_port1.json")["raw"])
    assert raw["globs"][RDMA_GLOBS[pattern]][file]
    raw["globs"][RDMA_GLOBS[pattern]][file] = None
    links: dict[Role, LinkFacts] = {"head": parse(raw, "10.100.8.1"), "worker": facts("worker_port0_index5")}
    found = {check.node: check for check in judged(links) if check.id == "link_rdma"}
    assert (found["head"].verdict, found["worker"].verdict) == ("unseen", "ok")
    assert found["head"].advice == f"type `cat {file}` on that node"


def test_an_empty_entry_is_no_unreadable_one() -> None:
    raw = copy.deepcopy(read_case(CASES / "link" / "type_unreadable.json")["raw"])
    unread = f"{ROCE}/gid_attrs/types/3"
    links: dict[Role, LinkFacts] = {"head": parse(raw, "10.100.8.1"), "worker": facts("worker_port0_index5")}
    assert [check.verdict for check in judged(links) if check.id == "link_rdma"] == ["unseen", "ok"]
    raw["globs"][RDMA_GLOBS["type"]][unread] = "IB/RoCE v1\n"  # what is left unreadable belongs to empty entries
    links["head"] = parse(raw, "10.100.8.1")
    assert [check.verdict for check in judged(links) if check.id == "link_rdma"] == ["fail", "ok"]


def test_an_mtu_that_differs() -> None:
    found = failed(facts("head_port1"), facts("wifi"), rdma=False)
    assert found.keys() == OVER_WIFI
    assert found["link_mtu", ""].observed == "MTU: head 9000, worker 1500"


@pytest.mark.parametrize(
    ("name", "observed"), [("nobody", "no interface owns 10.100.8.2"), ("unset", "SPARKSERVE_HEAD_LINK is not set")]
)
def test_no_interface_tells_the_choice(name: str, observed: str) -> None:
    check = failed(facts(name), facts("worker_port0_index5"))["link_address", "head"]
    assert check.observed == observed
    assert check.advice == (
        "write to .env (enp1s0f1np1 to enp1s0f0np0: both in 10.100.8.0/24, RDMA on both, 200 Gb/s, MTU 9000):\n"
        "SPARKSERVE_HEAD_LINK=10.100.8.1\nSPARKSERVE_WORKER_LINK=10.100.8.2"
    )


def test_the_same_address_twice() -> None:
    assert list(failed(facts("head_port1"), facts("head_port1"))) == [("link_same", "")]
