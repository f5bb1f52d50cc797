"""What a node says, recorded from machines of several makes, taken apart; and how few questions it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest

from sparkserve import system_text
from sparkserve.system import PortFacts, SystemFacts, gather, parse, parse_disk
from sparkserve.system_text import Listener, container_in, filesystem_of, parse_buddyinfo, parse_earlyoom
from tests.fakes import FakeSession, make_node
from tests.unit.cases import read_rows, row_name

IDENTITY = {"hostname": "spark-1", "user": "nvidia", "uid": 1000, "python": "3.12.3", "home": "/home/nvidia"}
RANK = "e" * 64


def answered(text: str, code: int = 0) -> dict[str, Any]:
    return {"code": code, "out": text, "err": ""}


def raw_facts(**changes: Any) -> dict[str, Any]:
    raw = {
        "machine": "aarch64",
        "kernel": "6.17.0-1032-nvidia",
        "time": 1.0,
        "clock": (0.0, 0.001),
        "files": {
            "/proc/meminfo": "MemTotal: 127547384 kB\nMemAvailable: 120000000 kB\n",
            "/proc/swaps": "Filename Type Size Used Priority\n",
            "/etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 24.04.3 LTS"\n',
            "/proc/mounts": "/dev/nvme0n1p2 / ext4 rw,relatime 0 0\n",
            "/proc/uptime": "86400.12 1000.0\n",
            "/proc/cmdline": "quiet kho=off\n",
        },
        "disks": {
            "/m": {"place": "/", "device": 1, "free": 10**12, "total": 10**12, "inodes": 10**6, "writable": True},
        },
        "docker": {"/info": {"status": 200, "body": {"ServerVersion": "28.3.3"}}},
        "tools": {"git": "/usr/bin/git", "nvidia-smi": "/usr/bin/nvidia-smi"},
        "ports": {"8000": "free", "8001": "free"},
        "commands": {"sudo": answered("", 1), "groups": answered("nvidia sudo docker\n")},
    }
    return {**raw, **changes}


def facts(**changes: Any) -> SystemFacts:
    places = changes.pop("places", {"models": "/m"})
    return parse(raw_facts(**changes), {**IDENTITY, **changes.pop("identity", {})}, places)


def rows(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return pytest.mark.parametrize("case", read_rows("system", name), ids=row_name)


@rows("meminfo")
def test_meminfo(case: dict[str, Any]) -> None:
    assert system_text.parse_meminfo(case["text"]) == case["memory"]


@rows("swaps")
def test_swaps(case: dict[str, Any]) -> None:
    assert system_text.parse_swaps(case["text"]) == case["used"]


@rows("buddyinfo")
def test_buddyinfo(case: dict[str, Any]) -> None:
    assert parse_buddyinfo(case["text"], case["page"]) == case["free"]


@rows("filesystem")
def test_filesystem(case: dict[str, Any]) -> None:
    assert filesystem_of(case["path"], case["mounts"]) == case["kind"]


@rows("docker")
def test_docker(case: dict[str, Any]) -> None:
    *words, runtimes = case["facts"]
    assert astuple(system_text.parse_docker(case["raw"])) == (*words, tuple(runtimes), ())


@rows("containers")
def test_containers(case: dict[str, Any]) -> None:
    found = system_text.parse_containers(case["raw"])
    assert (None if found is None else [[*vars(one).values()] for one in found]) == (
        case["found"] and [[*row[:5], tuple(row[5])] for row in case["found"]]
    )


@rows("compute_apps")
def test_compute_apps(case: dict[str, Any]) -> None:
    wanted = None if case["apps"] is None else tuple((pid, name) for pid, name in case["apps"])
    assert system_text.parse_compute_apps(case["answer"]) == wanted
    found = facts(commands={**raw_facts()["commands"], "apps": case["answer"]}).gpu_processes
    assert (None if found is None else tuple((one.pid, one.name) for one in found)) == wanted


@rows("listeners")
def test_listeners(case: dict[str, Any]) -> None:
    wanted = None if case["found"] is None else tuple(Listener(*row) for row in case["found"])
    assert system_text.parse_listeners(case["answer"]) == wanted


@rows("own_name")
def test_own_name(case: dict[str, Any]) -> None:
    wanted = None if case["found"] is None else tuple(case["found"])
    assert system_text.parse_addresses(case["answer"]) == wanted


@rows("gpu")
def test_gpu(case: dict[str, Any]) -> None:
    commands = {**raw_facts()["commands"], "gpu": case["answer"]}
    found = facts(commands=commands, tools={"nvidia-smi": case["tool"]})
    assert (found.gpu, found.gpu_error) == (case["gpu"] and tuple(case["gpu"]), case["error"])


@rows("sudo")
def test_sudo(case: dict[str, Any]) -> None:
    identity = {**IDENTITY, "uid": case["uid"]}
    raw = raw_facts(commands={"sudo": case["answer"]}, tools={"sudo": case["tool"]})
    assert parse(raw, identity, {}).sudo == case["mode"]


@pytest.mark.parametrize(
    ("groups", "listed", "uid", "counts"),
    [
        ("nvidia docker", "docker:x:999:nvidia", 1000, (True, True)),
        ("nvidia", "docker:x:999:other,nvidia", 1000, (False, True)),
        ("nvidia", "docker:x:999:nvidia2", 1000, (False, False)),
        ("nvidia", "\n", 1000, (False, False)),
        ("root", "docker:x:999:", 0, (True, False)),
        (None, "docker:x:999:nvidia", 1000, (None, True)),
        ("nvidia", None, 1000, (False, None)),
    ],
)
def test_the_docker_group(
    groups: str | None, listed: str | None, uid: int, counts: tuple[bool | None, bool | None]
) -> None:
    answers = {"groups": groups, "docker_group": listed}
    commands = {**raw_facts()["commands"], **{name: text and answered(text) for name, text in answers.items()}}
    found = parse(raw_facts(commands=commands), {**IDENTITY, "uid": uid}, {})
    assert (found.in_docker_group, found.docker_member) == counts


def test_facts() -> None:
    found = facts()
    assert (found.hostname, found.user, found.system) == ("spark-1", "nvidia", "Ubuntu 24.04.3 LTS")
    assert (found.memory["MemAvailable"], found.swap_used, found.uptime) == (120000000 * 1024, 0, 86400.12)
    assert (found.kernel_options, found.disks["models"].filesystem) == ("quiet kho=off", "ext4")
    assert found.ports == {8000: PortFacts(free=True), 8001: PortFacts(free=True)}
    assert (found.serves, found.gives_gpus) == (False, False)


def test_what_could_not_be_read_stays_empty() -> None:
    found = facts(files={}, commands={"sudo": None})
    assert (found.system, found.memory, found.swap_used) == ("", {}, None)
    assert (found.large_free, found.gpu_processes, found.containers, found.own_addresses) == (None, None, None, None)
    assert parse_disk("/m", {"error": "Permission denied"}).error == "Permission denied"


HELD = "Address already in use"
WEB = {"Id": "b" * 64, "Names": ["/web"], "Image": "nginx:1", "Ports": [{"PublicPort": 8000}]}
OURS = {"Id": RANK, "Names": ["/rank"], "Image": "x", "Labels": {"sparkserve.owner": "sparkserve"}}


@pytest.mark.parametrize(
    ("line", "containers", "holder", "ours"),
    [
        ('users:(("python3",pid=7,fd=3)) uid:1000', [], "python3 (process 7)", False),
        ("uid:33 ino:1", [], "a process of uid 33, which this account may not look at", False),
        (
            "ino:1 cgroup:/system.slice/nginx.service",
            [],
            "a process of root, which this account may not look at",
            False,
        ),
        ("ino:1", [WEB], "container web (nginx:1)", False),
        (f"ino:1 cgroup:/system.slice/docker-{RANK}.scope", [OURS, WEB], "container rank (x)", True),
    ],
)
def test_who_holds_a_port(line: str, containers: list[dict[str, Any]], holder: str, ours: bool) -> None:
    commands = {**raw_facts()["commands"], "listeners": answered(f"LISTEN 0 9 0.0.0.0:8000 0.0.0.0:* {line}\n")}
    docker = {"/info": {"error": "x"}, "/containers/json": {"status": 200, "body": containers}}
    found = facts(commands=commands, docker=docker, ports={"8000": HELD})
    container = holder.split()[1] if holder.startswith("container ") else ""
    assert found.ports[8000] == PortFacts(free=False, holder=holder, ours=ours, container=container)


def test_a_holder_that_is_not_to_be_seen() -> None:
    found = facts(ports={"8000": HELD}).ports[8000]
    assert (found.free, HELD in found.holder) == (False, True)


@pytest.mark.parametrize(
    ("listeners", "containers", "free"),
    [
        (answered(""), [], True),
        (None, [], None),
        (answered("LISTEN 0 9 0.0.0.0:80 0.0.0.0:*\n"), [], False),
        (None, [{**WEB, "Ports": [{"PublicPort": 80}]}], False),
    ],
)
def test_a_port_that_this_account_may_not_try(listeners: Any, containers: Any, free: bool | None) -> None:
    docker = {"/info": {"error": "x"}, "/containers/json": {"status": 200, "body": containers}}
    commands = {**raw_facts()["commands"], "listeners": listeners}
    assert facts(commands=commands, docker=docker, ports={"80": "Permission denied"}).ports[80].free is free


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (answered("active\ninactive\n", 3), ("systemd-oomd",)),
        (answered("active\nactive\n"), ("systemd-oomd", "earlyoom")),
        (answered("inactive\nunknown\n", 4), ()),
        (answered("", 1), None),
        (None, None),
    ],
)
def test_daemons_that_end_processes(answer: Any, found: tuple[str, ...] | None) -> None:
    assert facts(commands={**raw_facts()["commands"], "oom_daemons": answer}).oom_daemons == found


@pytest.mark.parametrize(
    ("answer", "floor"),
    [
        (answered("/usr/bin/earlyoom -r 3600\n"), 12_000),  # ten percent is its default
        (answered("/usr/bin/earlyoom -m 4,2 -s 100 --avoid '^sshd$'\n"), 4_800),
        (answered("earlyoom -m4\n"), 4_800),
        (answered("earlyoom -M 2048,1024\n"), 2048 * 1024),
        (answered("earlyoom -M 2 -m 10\n"), 2048),
        (answered("", 1), None),
        (None, None),
    ],
)
def test_below_what_earlyoom_ends_processes(answer: Any, floor: int | None) -> None:
    assert parse_earlyoom(answer, 120_000) == floor


def test_a_gpu_that_docker_found_described() -> None:
    devices = [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}, {"Source": "cdi", "ID": "vendor.com/net=0"}]
    info = {"status": 200, "body": {"ServerVersion": "28.4", "Runtimes": {"runc": {}}, "DiscoveredDevices": devices}}
    found = facts(docker={"/info": info})
    assert (found.docker.cdi, found.gives_gpus) == (("nvidia.com/gpu=all",), True)


def test_a_process_on_the_gpu_is_found_in_its_container() -> None:
    commands = {**raw_facts()["commands"], "apps": answered("7, vllm, 9 MiB\n8, python3, 9 MiB\n")}
    files = {
        **raw_facts()["files"],
        "/proc/7/cgroup": f"0::/system.slice/docker-{RANK}.scope\n",
        "/proc/8/cgroup": None,
    }
    docker = {"/info": {"error": "x"}, "/containers/json": {"status": 200, "body": [OURS]}}
    found = facts(commands=commands, files=files, docker=docker).gpu_processes
    assert found is not None
    assert [(one.pid, one.container, one.ours) for one in found] == [(7, "rank", True), (8, "", False)]
    assert container_in("/docker/short") == ""


def test_a_node_is_asked_three_times_at_most_and_its_clock_compared() -> None:
    ahead = 42.0

    def answer(**fields: Any) -> dict[str, Any]:
        if not fields:
            return {"time": time.time() + ahead}
        if "/info" not in fields.get("docker", ()):
            assert fields == {"disks": ["/var/lib/docker"], "files": ["/proc/7/cgroup"]}
            disk = {"place": "/", "device": 1, "free": 1, "total": 1, "inodes": 1, "writable": False}
            return {"disks": {"/var/lib/docker": disk}, "files": {"/proc/7/cgroup": None}}
        assert fields["commands"]["own_name"] == ["getent", "ahostsv4", "spark-1"]
        disks = {path: raw_facts()["disks"]["/m"] for path in fields["disks"]}
        info = {"status": 200, "body": {"ServerVersion": "28", "DockerRootDir": "/var/lib/docker"}}
        commands = {**raw_facts()["commands"], "apps": answered("7, vllm, 9 MiB\n")}
        return raw_facts(disks=disks, docker={"/info": info}, commands=commands, ports={})

    session = FakeSession({"hello": IDENTITY, "facts": answer})
    found = gather(make_node("worker", session=session))
    assert [do for do, _ in session.asked] == ["hello", "facts", "facts", "facts"]
    assert abs(found.clock[0] - ahead) <= found.clock[1] < 1
    assert found.disks["docker"].path == "/var/lib/docker"
