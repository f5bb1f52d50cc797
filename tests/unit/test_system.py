from __future__ import annotations

from typing import Any

import pytest

from sparkserve.checks import (
    DiskNeed,
    check_basics,
    check_disks,
    check_memory,
    check_ports,
    check_sudo,
    raise_failures,
    show_size,
)
from sparkserve.cluster import Role
from sparkserve.errors import EXIT_NOT_READY, SparkserveError, flatten
from sparkserve.recipe_source import load_recipe
from sparkserve.system import DockerFacts, SystemFacts, parse, parse_disk, parse_docker, parse_meminfo, parse_swaps
from tests.unit.cases import CASES, read_rows, row_name

GIB = 1024**3


def raw_facts(**changes: Any) -> dict[str, Any]:
    raw = {
        "machine": "aarch64",
        "kernel": "6.14.0-1013-nvidia",
        "time": 1.0,
        "files": {
            "/proc/meminfo": "MemTotal: 127547384 kB\nMemAvailable: 120000000 kB\n",
            "/proc/swaps": "Filename Type Size Used Priority\n",
            "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
        },
        "disks": {
            "/m": {"place": "/", "device": 1, "free": 10**12, "total": 10**12, "inodes": 10**6, "writable": True},
        },
        "docker": {"/info": {"status": 200, "body": {"ServerVersion": "28.3.3"}}},
        "tools": {"git": "/usr/bin/git", "ssh": "/usr/bin/ssh"},
        "ports": {"8000": "free", "8001": "free"},
        "commands": {"sudo": {"code": 1, "out": "", "err": ""}},
    }
    return {**raw, **changes}


def facts(**changes: Any) -> SystemFacts:
    identity = {"hostname": "spark-1", "user": "nvidia", "uid": 1000}
    places = changes.pop("places", {"models": "/m"})
    return parse(raw_facts(**changes), identity, places)


def pair(head: SystemFacts | None = None, worker: SystemFacts | None = None) -> dict[Role, SystemFacts]:
    return {"head": head or facts(), "worker": worker or facts()}


@pytest.mark.parametrize("case", read_rows("system", "meminfo"), ids=row_name)
def test_meminfo(case: dict[str, Any]) -> None:
    assert parse_meminfo(case["text"]) == case["memory"]


@pytest.mark.parametrize("case", read_rows("system", "swaps"), ids=row_name)
def test_swaps(case: dict[str, Any]) -> None:
    assert parse_swaps(case["text"]) == case["used"]


@pytest.mark.parametrize("case", read_rows("system", "docker"), ids=row_name)
def test_docker(case: dict[str, Any]) -> None:
    assert parse_docker(case["raw"]) == DockerFacts(*case["facts"])


@pytest.mark.parametrize("case", read_rows("system", "sudo"), ids=row_name)
def test_sudo(case: dict[str, Any]) -> None:
    identity = {"hostname": "h", "user": "u", "uid": case["uid"]}
    found = parse(raw_facts(commands={"sudo": case["answer"]}), identity, {})
    assert found.sudo == case["mode"]
    for have_password in (False, True):
        good = case["mode"] in ("root", "free") or (case["mode"] == "password" and have_password)
        check = check_sudo(found, "head", have_password=have_password)
        assert (check.verdict, check.node) == ("ok" if good else "fail", "head")


def test_facts() -> None:
    found = facts()
    assert (found.hostname, found.user, found.system) == ("spark-1", "nvidia", "Ubuntu 24.04.3 LTS")
    assert (found.available, found.swap_used, found.ports) == (120000000 * 1024, 0, {8000: "free", 8001: "free"})


def test_what_could_not_be_read_stays_empty() -> None:
    found = facts(files=dict.fromkeys(("/proc/meminfo", "/proc/swaps", "/etc/os-release")))
    assert (found.system, found.memory, found.available) == ("", {}, 0)
    assert parse_disk("/m", {"error": "Permission denied"}).writable is False


# -- checks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", read_rows("system", "disks"), ids=row_name)
def test_disks(case: dict[str, Any]) -> None:
    raw = {place: {"place": place, "total": 10**13, **disk} for place, disk in case["disks"].items()}
    system = pair(facts(disks=raw, places={place: place for place in raw}))
    found = check_disks([DiskNeed(**need) for need in case["needs"]], system)
    assert [check.id for check in found if check.verdict == "fail"] == case["failed"]
    assert {check.node for check in found} <= {"head"}


def test_a_disk_that_is_too_small_says_what_needs_how_much() -> None:
    disk = {"place": "/", "device": 1, "free": 4 * 10**11, "total": 10**12, "inodes": 5000, "writable": True}
    (check,) = check_disks(
        [DiskNeed("worker", "models", 413_800_000_000, "weights")], pair(None, facts(disks={"/m": disk}))
    )
    assert check.observed == "/m: 400.0 GB (372.5 GiB) free, 5000 inodes"
    assert check.needed == "415.8 GB (387.2 GiB) (weights 413.8 GB (385.4 GiB), and 2.0 GB (1.9 GiB) to spare)"
    assert (check.node, check.verdict, "SPARKSERVE_MODELS_DIR" in check.hint) == ("worker", "fail", True)


@pytest.mark.parametrize(("gib", "verdict"), [(100, "ok"), (99.99, "fail"), (0, "fail")])
def test_memory(gib: float, verdict: str) -> None:
    files = {"/proc/meminfo": f"MemAvailable: {int(gib * GIB / 1024)} kB\n", "/proc/swaps": "", "/etc/os-release": ""}
    recipe = load_recipe(str(CASES / "recipe" / "minimal"))
    found = check_memory(recipe, pair(None, facts(files=files)))
    assert [(check.node, check.verdict) for check in found] == [("head", "ok"), ("worker", verdict)]


def test_ports() -> None:
    taken = facts(ports={"8000": "Address already in use", "8001": "free"})
    found = check_ports({"api": 8000, "master": 8001}, pair(taken))
    (check,) = [check for check in found if check.verdict == "fail"]
    assert (check.node, check.observed) == ("head", "port 8000 (api): Address already in use")
    assert check.hint.endswith("or set SPARKSERVE_API_PORT")


def test_basics_name_everything_at_once() -> None:
    recipe = load_recipe(str(CASES / "recipe" / "minimal"))
    broken = facts(machine="x86_64", docker={"/info": {"error": "permission"}}, tools={"git": None, "ssh": None})
    with pytest.raises(SparkserveError) as caught:
        raise_failures(check_basics(recipe, pair(None, broken)))
    errors = flatten(caught.value)
    assert caught.value.exit_code == EXIT_NOT_READY
    assert [(error.code, error.node) for error in errors] == [
        ("check_docker", "worker"),
        ("check_tools", "worker"),
        ("check_architecture", "worker"),
    ]
    assert "usermod -aG docker" in errors[0].hint
    assert errors[1].hint == "sudo apt-get install git openssh-client"
    raise_failures(check_basics(recipe, pair()))


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0.0 MB"), (99_999_999, "100.0 MB"), (10**9, "1.0 GB (0.9 GiB)"), (500 * GIB, "536.9 GB (500.0 GiB)")],
)
def test_show_size(size: int, shown: str) -> None:
    assert show_size(size) == shown
