"""Every check on facts that are in order, on facts that are not, and where nothing could be seen."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sparkserve
from sparkserve.check_catalog import CATALOG, find_entry
from sparkserve.checks import Check, DiskNeed, Subject, raise_failures, show_size
from sparkserve.errors import EXIT_NOT_READY, EXIT_USAGE, SparkserveError, flatten
from sparkserve.link import Interface
from sparkserve.link_rdma import RdmaDevice
from sparkserve.need_checks import check_disks
from sparkserve.preflight import judge
from sparkserve.recipe import Recipe
from sparkserve.system import DiskFacts, GpuProcess, PortFacts
from sparkserve.system_text import Container, DockerFacts
from tests.unit.cases import read_rows, row_name
from tests.unit.facts import GIB, HOOK, make_link, make_subject, make_system

NEEDS = (DiskNeed("worker", "models", 413_800_000_000, "weights"), DiskNeed("worker", "docker", 0, "engine image"))
MEMORY = make_system().memory
OURS = Container("a" * 64, "sparkserve-rank0", "sparkserve/x:1", True, True, ())
WEB = Container("b" * 64, "web", "nginx:1", False, False, (8080,))
# Judged elsewhere: what the doctor says of a node, what a start asks a container, and what the link's own proof says.
# A node that cannot be reached is never a failed one.
BROKEN_OFF = "component/test_link_proof.py::test_a_proof_that_breaks_off_keeps_what_was_seen"
ELSEWHERE: dict[str, dict[str, str]] = {
    "reach": {
        "ok": "unit/test_doctor.py::test_a_worker_that_was_not_reached_leaves_the_heads_checks_and_the_reason",
        "unseen": "unit/test_doctor.py::test_a_worker_that_was_not_reached_leaves_the_heads_checks_and_the_reason",
    },
    "source": {
        "ok": "component/test_source_checks.py::test_all_is_there_and_open",
        "fail": "component/test_source_checks.py::test_what_is_missing_is_told_without_any_container",
        "unseen": "component/test_source_checks.py::test_a_container_that_does_not_run",
    },
    "link_mtu_path": {
        "ok": "unit/test_link_proof.py::test_frames",
        "fail": "unit/test_link_proof.py::test_frames",
        "unseen": BROKEN_OFF,
    },
    "link_tcp": {
        "ok": "unit/test_link_proof.py::test_tcp",
        "fail": "unit/test_link_proof.py::test_tcp",
        "unseen": BROKEN_OFF,
    },
    "link_bandwidth": {
        "ok": "unit/test_link_proof.py::test_bandwidth",
        "fail": "unit/test_link_proof.py::test_bandwidth",
        "unseen": BROKEN_OFF,
    },
    "link_rdma_bandwidth": {
        "ok": "component/test_link_proof.py::test_perftest_over_each_half",
        "fail": "component/test_link_proof.py::test_perftest_over_each_half",
        "warn": "component/test_link_proof.py::test_no_perftest",
        "unseen": BROKEN_OFF,
    },
}
# Checks that can always look.
NEVER_UNSEEN = {
    "tools": "the node's program always knows its own PATH",
    "architecture": "the node's program always knows its own machine",
    "clock": "the node's program always knows its own clock",
    "api_key": "settings and key are the head's own files: what doctor cannot read, a start cannot read either",
    "link_kind": "all facts of an end come in one answer; where it is missing, link_address says so",
    "link_halves": "as link_kind",
    "link_route": "as link_kind",
    "link_network": "as link_kind",
    "link_mtu": "as link_kind",
    "link_same": "the addresses are the settings' own",
}
UNREAD = SparkserveError("x", "cannot read /k", "make one")


def without_gpu(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"container": recipe.container.model_copy(update={"gpus": False, "devices": ()})})


def unpinned(recipe: Recipe) -> Recipe:
    env = {name: value for name, value in recipe.launch.env.items() if not name.endswith("SOCKET_IFNAME")}
    return recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"env": env})})


def disk(**changes: Any) -> dict[str, DiskFacts]:
    facts = {"path": "/data", "device": 9, "free": 10**12, "total": 10**12, "free_inodes": 10**6, "writable": True}
    return {"models": DiskFacts(**{**facts, "filesystem": "ext4", **changes})}


def worker(**changes: Any) -> dict[str, Any]:
    return {"system": {"worker": changes}}


def port(**changes: Any) -> dict[str, Any]:
    return worker(ports={8888: PortFacts(**changes)})


CABLE, TWIN = make_link("worker").interfaces
# Both ends share the first address's network, and the link's own address is alone in its.
ALIASED = replace(CABLE, addresses=("10.100.8.9", "10.100.8.2"), networks=("10.100.8.0/24", "10.100.8.2/32"))


def end(*interfaces: Interface, **changes: Any) -> dict[str, Any]:
    return {"links": {"worker": {**({"interfaces": interfaces} if interfaces else {}), **changes}}}


UNREADABLE = RdmaDevice("rocep1s0f1", CABLE.name, active=True, gids=(), unread="/sys/x/types/3")
TWINS = end(*make_link("head").interfaces)
NO_IP = SparkserveError("link_unseen", "`ip -json address` gave no answer", "sudo apt-get install iproute2")
UNLINKED = {"links": {"worker": None}, "unread": {("link_address", "worker"): NO_IP}}
# id, what is not as on a healthy pair, the verdict on the worker (or the pair), words of what is told.
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("docker", {}, "ok", "28.3.3"),
    ("docker", worker(docker=DockerFacts("refused")), "fail", "does not run"),
    ("docker", worker(docker=DockerFacts("permission")), "fail", "may not use"),
    ("docker", worker(docker=DockerFacts("timeout")), "unseen", "no answer"),
    ("docker", worker(docker=DockerFacts("failed")), "unseen", "cannot be asked"),
    ("docker_group", {}, "ok", "spark may ask"),
    ("docker_group", worker(in_docker_group=False), "ok", "spark may ask"),
    (
        "docker_group",
        worker(in_docker_group=False, docker=DockerFacts("permission")),
        "fail",
        "a member since this session began",
    ),
    (
        "docker_group",
        worker(in_docker_group=False, docker_member=False, docker=DockerFacts("permission")),
        "fail",
        "spark is no member",
    ),
    ("docker_group", worker(in_docker_group=None, docker=DockerFacts("missing")), "unseen", "getent group docker"),
    (
        "docker_group",
        worker(in_docker_group=False, docker_member=None, docker=DockerFacts("permission")),
        "unseen",
        "getent group docker",
    ),
    ("docker_runtime", {}, "ok", "knows the runtime nvidia"),
    (
        "docker_runtime",
        worker(docker=DockerFacts("", "28", cdi=("nvidia.com/gpu=all",)), tools={HOOK: None}),
        "ok",
        "gives nvidia.com/gpu=all by CDI",
    ),
    ("docker_runtime", worker(docker=DockerFacts("", "28")), "ok", "runtime nvidia; nvidia-container-runtime-hook is"),
    ("docker_runtime", worker(docker=DockerFacts("", "28"), tools={HOOK: None}), "fail", "no nvidia-container-runtime"),
    ("docker_runtime", worker(docker=DockerFacts("missing")), "unseen", "docker version"),
    ("tools", {}, "ok", "all tools there"),
    ("tools", worker(tools={"docker": None}), "fail", "not on PATH: docker"),
    ("architecture", {}, "ok", "arm64"),
    ("architecture", worker(machine="x86_64"), "fail", "the machine is amd64"),
    ("python", {}, "ok", "3.12.3"),
    ("python", worker(python="3.8.10"), "fail", "3.8.10"),
    ("python", worker(python=""), "unseen", "of no known version"),
    ("kernel", {}, "ok", "6.17.0-1032-nvidia"),
    ("kernel", worker(kernel="7.0.0-1019-nvidia"), "warn", "RDMA was seen to fail"),
    (
        "kernel",
        worker(kernel="7.0.0-1019-nvidia", memory={**MEMORY, "CmaFree": 9 * GIB}),
        "fail",
        "more than CmaTotal",
    ),
    ("kernel", worker(kernel="7.0.0-1019-nvidia", kernel_options="quiet kho=off"), "ok", "7.0.0-1019-nvidia"),
    ("kernel", worker(memory={**MEMORY, "CmaFree": 9 * GIB}), "warn", "the sign of it"),
    (
        "kernel",
        {"recipe": without_gpu, **worker(kernel="7.0.0-1", memory={**MEMORY, "CmaFree": 9 * GIB})},
        "warn",
        "more than CmaTotal",
    ),
    ("kernel", worker(memory={}), "unseen", "/proc/meminfo"),
    ("gpu", {}, "ok", "NVIDIA GB10, driver 580.173.02"),
    ("gpu", worker(gpu=None, gpu_error="missing"), "fail", "nvidia-smi: missing"),
    ("gpu", worker(gpu=None, gpu_error="Failed to initialize NVML"), "fail", "Failed to initialize NVML"),
    ("gpu", worker(gpu=None, gpu_error="no answer"), "unseen", "no answer"),
    ("gpu_processes", {}, "ok", "none"),
    ("gpu_processes", worker(gpu_processes=(GpuProcess(7, "vllm", "mine", ours=True),)), "ok", "none"),
    ("gpu_processes", worker(gpu_processes=(GpuProcess(7, "python3"),)), "warn", "python3 (process 7)"),
    ("gpu_processes", worker(gpu_processes=(GpuProcess(7, "vllm", "other"),)), "warn", "vllm (process 7 in other)"),
    ("gpu_processes", worker(gpu_processes=None), "unseen", "does not tell"),
    ("containers", {}, "ok", "none of others"),
    ("containers", worker(containers=(OURS, WEB)), "ok", "web (8080)"),
    ("containers", worker(containers=(Container("c" * 64, "ray", "ray:2", False, True, ()),)), "warn", "network: ray"),
    ("containers", worker(containers=None), "unseen", "docker ps"),
    ("containers", {"unread": {("containers", "worker"): UNREAD}}, "unseen", "docker ps"),
    ("memory", {}, "ok", "122.4 GB (114.0 GiB)"),
    ("memory", worker(memory={**MEMORY, "MemAvailable": 107 * GIB}), "fail", "114.9 GB (107.0 GiB)"),
    ("memory", worker(memory={**MEMORY, "MemAvailable": 5 * GIB}, containers=(OURS,)), "ok", "beside the rank"),
    ("memory", worker(memory={**MEMORY, "MemAvailable": GIB}, containers=(OURS,)), "warn", "beside the rank"),
    ("memory", worker(memory={}), "unseen", "/proc/meminfo"),
    ("memory", worker(memory={"MemTotal": 120 * GIB}), "unseen", "/proc/meminfo"),
    ("swap", {}, "ok", "17.2 GB (16.0 GiB)"),
    ("swap", worker(swap_used=3 * GIB), "warn", "3.2 GB (3.0 GiB) of"),
    ("swap", worker(memory={**MEMORY, "SwapTotal": 0}), "warn", "no swap"),
    ("swap", worker(swap_used=None), "unseen", "/proc/swaps"),
    ("oom_daemons", {}, "ok", "running: systemd-oomd"),
    ("oom_daemons", worker(oom_daemons=()), "ok", "running: none"),
    ("oom_daemons", worker(oom_daemons=("systemd-oomd", "earlyoom")), "warn", "running: systemd-oomd and earlyoom"),
    ("oom_daemons", worker(oom_daemons=("earlyoom",), earlyoom_floor=GIB), "ok", "running: earlyoom"),
    ("oom_daemons", worker(oom_daemons=("earlyoom",), earlyoom_floor=2 * GIB), "warn", "(2.0 GiB) of memory available"),
    ("oom_daemons", worker(oom_daemons=(), earlyoom_floor=12 * GIB), "warn", "earlyoom ends what is largest below 12"),
    ("oom_daemons", worker(oom_daemons=None), "unseen", "systemctl"),
    ("page_cache", {}, "ok", "110.0 GiB"),
    ("page_cache", worker(memory={**MEMORY, "MemFree": 4 * GIB, "Cached": 108 * GIB}), "warn", "in the page cache"),
    ("page_cache", worker(memory={**MEMORY, "MemFree": 4 * GIB}, containers=(OURS,)), "ok", "4.0 GiB"),
    ("page_cache", worker(memory={}), "unseen", "/proc/meminfo"),
    ("fragmentation", {}, "ok", "in large pieces, up for 1 days"),
    ("fragmentation", worker(large_free=27 * 16 << 20, uptime=7 * 86400.0), "warn", "up for 7 days"),
    ("fragmentation", worker(large_free=0, memory={**MEMORY, "MemFree": GIB}), "ok", "0.0 MB"),
    ("fragmentation", worker(large_free=None), "unseen", "/proc/buddyinfo"),
    ("local_disk", {}, "ok", "models: ext4"),
    ("local_disk", worker(disks=disk(filesystem="nfs4")), "warn", "models: nfs4"),
    ("local_disk", worker(disks=disk(filesystem="")), "unseen", "/proc/mounts"),
    ("hostname", {}, "ok", "spark-worker resolves to 192.168.1.21"),
    ("hostname", worker(own_addresses=("127.0.1.1",)), "ok", "the recipe sets GLOO_SOCKET_IFNAME"),
    ("hostname", {"recipe": unpinned, **worker(own_addresses=("127.0.1.1",))}, "warn", "resolves to 127.0.1.1"),
    ("hostname", {"recipe": unpinned, **worker(own_addresses=())}, "warn", "resolves to nothing"),
    ("hostname", {"recipe": unpinned, **worker(own_addresses=None)}, "unseen", "getent"),
    ("disk", {"needs": NEEDS}, "ok", "2000.0 GB (1862.6 GiB) free"),
    ("disk", {"needs": NEEDS, **worker(disks=disk(free=4 * 10**11))}, "fail", "400.0 GB (372.5 GiB) free"),
    ("disk", {"needs": NEEDS, **worker(disks=disk(free_inodes=10))}, "fail", "10 inodes"),
    ("disk", {"needs": NEEDS, **worker(disks=disk(error="Permission denied"))}, "unseen", "Permission denied"),
    ("writable", {"needs": NEEDS}, "ok", "can be written"),
    ("writable", {"needs": NEEDS, **worker(disks=disk(writable=False))}, "fail", "/data cannot be written"),
    ("writable", {"needs": NEEDS, **worker(disks=disk(error="Permission denied"))}, "unseen", "Permission denied"),
    ("writable", worker(disks=disk(blocked_by="/data")), "fail", "/data is a file"),
    ("writable", {"needs": NEEDS, **worker(disks=disk(blocked_by="/da"))}, "fail", "/da is a file"),
    ("port", {}, "ok", "port 8888 (api): free"),
    ("port", port(free=False, holder="python3 (process 7)"), "fail", "held by python3 (process 7)"),
    ("port", port(free=False, holder="container web (nginx:1)"), "fail", "held by container web (nginx:1)"),
    ("port", port(free=False, holder="container sparkserve-rank1 (x)", ours=True), "ok", "our own rank"),
    ("port", port(free=None, holder="Permission denied"), "unseen", "could not be tried: Permission denied"),
    ("api_key", {"unread": {("api_key", "head"): UNREAD}}, "fail", "cannot read /k"),
    ("api_key", {}, "ok", "127.0.0.1 without"),
    ("api_key", {"settings": {"api_host": "0.0.0.0"}}, "fail", "0.0.0.0 without a key"),
    ("api_key", {"settings": {"api_host": "0.0.0.0", "api_open": True}}, "warn", "0.0.0.0 without a key"),
    ("api_key", {"settings": {"api_host": "0.0.0.0", "api_key_file": "/k"}}, "ok", "0.0.0.0 with a key"),
    ("sudo", {}, "ok", "sudo: free"),
    ("sudo", worker(sudo="password"), "warn", "sudo: password"),
    ("sudo", {"settings": {"sudo_password_file": "/p"}, **worker(sudo="password")}, "ok", "sudo: password"),
    ("sudo", {"unread": {("sudo", "worker"): UNREAD}, **worker(sudo="password")}, "fail", "cannot read /k"),
    ("sudo", {"unread": {("sudo", "worker"): UNREAD}, **worker(sudo="free")}, "ok", "sudo: free"),
    ("sudo", worker(sudo="password for `tee /x`"), "warn", "sudo: password for `tee /x`"),
    ("sudo", {"rooted": {"worker": False}, **worker(sudo="password for `tee /x`")}, "fail", "for `tee /x`"),
    ("sudo", worker(sudo="no answer"), "unseen", "no answer"),
    ("sudo", {"rooted": {"worker": False}, **worker(sudo="password")}, "fail", "sudo: password"),
    ("sudo", {"rooted": {"worker": True}, **worker(sudo="password")}, "ok", "sudo: password"),
    ("sudo", {"rooted": {"worker": True}, **worker(sudo="missing")}, "fail", "sudo: missing"),
    ("same_machine", {}, "ok", "spark-head and spark-worker"),
    ("same_machine", worker(hostname="spark-head"), "ok", "spark-head and spark-head"),
    ("same_machine", {**worker(hostname="spark-head"), **TWINS}, "fail", "both are spark-head, with the same"),
    ("same_machine", {**worker(hostname="spark-head"), **UNLINKED}, "unseen", "ip address"),
    ("clock", {}, "ok", "0.000 s"),
    ("clock", worker(clock=(7.5, 0.002)), "warn", "7.500 s ahead, ±0.003 s"),
    ("clock", worker(clock=(-7.5, 0.002)), "warn", "7.500 s behind"),
    ("clock", worker(clock=(2.5, 0.6)), "ok", "±0.601 s"),
    ("driver_match", {}, "ok", "580.173.02"),
    ("driver_match", worker(gpu=("NVIDIA GB10", "590.10")), "warn", "head 580.173.02, worker 590.10"),
    ("driver_match", worker(gpu=None, gpu_error="no answer"), "unseen", "nvidia-smi"),
    ("kernel_match", {}, "ok", "6.17.0-1032-nvidia"),
    ("kernel_match", worker(kernel="6.14.0"), "warn", "worker 6.14.0"),
    ("kernel_match", worker(kernel=""), "unseen", "uname"),
    ("docker_match", {}, "ok", "28.3.3"),
    ("docker_match", worker(docker=DockerFacts("", "27.5.1")), "warn", "worker 27.5.1"),
    ("docker_match", worker(docker=DockerFacts("missing")), "unseen", "docker version"),
    ("link_address", {}, "ok", "enp1s0f1np1 owns 10.100.8.2"),
    ("link_address", {"links": {"worker": {"interface": ""}}}, "fail", "no interface owns 10.100.8.2"),
    ("link_address", {"links": {"worker": {"interface": "", "address": ""}}}, "fail", "WORKER_LINK is not set"),
    ("link_address", UNLINKED, "unseen", "gave no answer"),
    ("link_rdma", {}, "ok", "rocep1s0f1, roceP2p1s0f1, GID 3"),
    ("link_rdma", {"links": {"worker": {"gid_index": None}}}, "fail", "no active RDMA device of enp1s0f1np1"),
    ("link_rdma", {"links": {"worker": {"gid_index": None, "devices": (UNREADABLE,)}}}, "unseen", "cat /sys/x/types/3"),
    ("link_rdma", {"links": {"worker": {"devices": (UNREADABLE,)}}}, "ok", "GID 3"),
    ("link_mtu", {}, "ok", "head 9000, worker 9000"),
    ("link_mtu", {"links": {"worker": {"mtu": 1500}}}, "fail", "head 9000, worker 1500"),
    ("link_mtu", {"links": {"head": {"mtu": 1500}, "worker": {"mtu": 1500}}}, "warn", "head 1500, worker 1500"),
    ("link_kind", {}, "ok", "enp1s0f1np1 is no wireless one"),
    ("link_kind", end(replace(CABLE, wireless=True)), "fail", "enp1s0f1np1 is wireless"),
    ("link_halves", {}, "ok", "both halves"),
    ("link_halves", end(hcas=("rocep1s0f1",), twin=""), "warn", "one half of the port is used: the other one is down"),
    ("link_halves", end(hcas=("rocep1s0f1",)), "warn", "enP2p1s0f1np1 has no GID at the same index"),
    ("link_halves", end(CABLE, replace(TWIN, addresses=()), hcas=("rocep1s0f1",)), "warn", "has no IPv4 address"),
    ("link_route", {}, "ok", "nothing else goes over enp1s0f1np1"),
    ("link_route", end(default_routes=("enp1s0f1np1",)), "warn", "the default route goes over the cable"),
    ("link_route", end(address="169.254.3.4"), "warn", "169.254.3.4 is link-local"),
    ("link_route", end(CABLE, replace(TWIN, networks=CABLE.networks)), "warn", "enP2p1s0f1np1 is in the network of"),
    ("link_network", {}, "ok", "are in one network, port 1 to port 1"),
    ("link_network", end(replace(CABLE, networks=("10.100.8.2/31",))), "fail", "different networks: nothing goes over"),
    ("link_network", end(replace(CABLE, networks=("10.100.8.2/32",))), "fail", "different networks: nothing goes over"),
    ("link_network", end(replace(CABLE, networks=("10.100.0.0/16",))), "ok", "are in one network"),
    ("link_network", end(ALIASED), "fail", "different networks: nothing goes over"),
    ("link_same", {}, "ok", "10.100.8.1 and 10.100.8.2"),
    ("link_same", {"links": {"worker": {"address": "10.100.8.1"}}}, "fail", "10.100.8.1 and 10.100.8.1"),
]  # fmt: skip


def judged(subject: Subject, name: str) -> list[Check]:
    """Give the check on the worker, or on the pair, or on the head where it is of the head alone."""
    found = [check for check in judge(subject) if check.id == name]
    assert found, name
    return [check for check in found if check.node != "head"] or found


@pytest.mark.parametrize(("name", "changes", "verdict", "words"), CASES)
def test_a_check(name: str, changes: dict[str, Any], verdict: str, words: str) -> None:
    found = judged(make_subject(**changes), name)[0]
    assert (found.verdict, words in found.observed) == (verdict, True), found
    assert found.needed
    assert bool(found.advice) is (verdict != "ok")
    if found.node == "worker" and not {"settings", "kinds"} & changes.keys():
        on_head = [check for check in judge(make_subject(**changes)) if check.node == "head" and check.id == name]
        assert {check.verdict for check in on_head} <= {"ok"}, on_head


def test_every_check_is_seen_in_order_and_not_and_unseen() -> None:
    seen = {name: {verdict for one, _, verdict, _ in CASES if one == name} for name in CATALOG.keys() - ELSEWHERE}
    missing = {name for name, found in seen.items() if "ok" not in found or not found & {"warn", "fail"}}
    assert missing == set()
    assert {name for name, found in seen.items() if "unseen" not in found} == NEVER_UNSEEN.keys()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_judged_elsewhere_has_its_tests_there(name: str) -> None:
    wanted = ELSEWHERE[name]
    assert {"ok", "unseen"} <= wanted.keys()
    assert wanted.keys() & {"warn", "fail"} or name == "reach"
    for verdict, place in wanted.items():
        path, _, test = place.partition("::")
        tree = ast.parse((Path(__file__).parents[1] / path).read_text())
        (found,) = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == test]
        words = {one.value for one in ast.walk(found) if isinstance(one, ast.Constant)}
        assert verdict in words, f"{place} says nothing of {verdict}"


def test_a_recipe_without_gpu_is_judged_without() -> None:
    found = judge(make_subject(recipe=without_gpu, **worker(gpu=None, gpu_error="missing", gpu_processes=None)))
    assert not {check.id for check in found} & {"gpu", "gpu_processes", "docker_runtime", "driver_match"}
    assert {check.verdict for check in found} == {"ok"}


def test_every_check_has_its_entry() -> None:
    named = {
        node.args[0].value
        for path in Path(sparkserve.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Check" and isinstance(node.args[0], ast.Constant)
    }
    assert len(named) > 20
    assert named <= CATALOG.keys()


def test_a_port_that_is_held_beside_a_rank_of_ours_is_its_own_on_either_node() -> None:
    held = {8888: PortFacts(free=False, holder="a process of root, which this account may not look at")}
    facts = {"ports": held, "containers": (OURS,)}
    found = [check for check in judge(make_subject(system={"head": facts, "worker": facts})) if check.id == "port"]
    assert [(check.node, check.verdict) for check in found] == [("head", "ok"), ("worker", "ok")]
    (idle,) = judged(make_subject(system={"worker": {"ports": held}}), "port")
    assert (idle.verdict, "sport = :8888" in idle.advice) == ("fail", True)


def test_a_strangers_container_on_a_port_is_no_rank_of_ours_beside_one() -> None:
    held = {8888: PortFacts(free=False, holder="container mine0 (x)", container="mine0")}
    (found,) = judged(make_subject(system={"worker": {"ports": held, "containers": (OURS,)}}), "port")
    assert (found.verdict, found.observed) == ("fail", "port 8888 (api): held by container mine0 (x)")
    assert found.advice == "docker stop mine0; or set SPARKSERVE_API_PORT"


def test_a_port_that_a_container_holds_names_the_container_to_stop() -> None:
    (found,) = judged(make_subject(**port(free=False, holder="container mine0 (x)", container="mine0")), "port")
    assert found.advice == "docker stop mine0; or set SPARKSERVE_API_PORT"


def ends(head: str = "", worker: str = "", **changes: Any) -> dict[str, Any]:
    """Give both nodes a cable with RDMA in one network, and a management port; `head`, `worker` are set addresses."""
    links = {}
    for number, (role, address) in enumerate((("head", head), ("worker", worker)), 1):
        cable = Interface("enp1s0f1np1", (f"10.100.8.{number}",), 9000, True, 200_000, ("10.100.8.0/24",))
        home = Interface("enP7s7", (f"192.168.1.{number}",), 1500, True, 10_000, ("192.168.1.0/24",))
        bridge = Interface("docker0", ("172.17.0.1",), 1500, True, None, ("172.17.0.0/16",), soft=True)
        links[role] = {
            "address": address, "interface": cable.name if address in cable.addresses else "",
            "interfaces": (replace(cable, **changes), home, bridge), "default_routes": ("enP7s7",),
            "devices": (RdmaDevice("rocep1s0f1", cable.name, active=True, gids=()),),
        }  # fmt: skip
    return {"links": links}


LINES = "\nSPARKSERVE_HEAD_LINK=10.100.8.1\nSPARKSERVE_WORKER_LINK=10.100.8.2"
NO_ADDRESS: dict[str, Any] = {"addresses": (), "networks": ()}
ADVICE = [
    (ends(), LINES, LINES),
    (ends(worker="10.9.9.9"), LINES, LINES),
    (ends(head="10.100.8.1"), None, LINES),
    (ends(**NO_ADDRESS), "address add 10.100.8.1/24 dev enp1s0f1np1", "address add 10.100.8.2/24 dev enp1s0f1np1"),
    (ends(up=False), "plug the cable in", "plug the cable in"),
    ({"links": {"head": ends()["links"]["head"], "worker": None}}, "once both nodes answer", None),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "head", "worker"), ADVICE)
def test_what_to_do_about_a_link_address(changes: dict[str, Any], head: str | None, worker: str | None) -> None:
    found = {check.node: check for check in judge(make_subject(**changes)) if check.id == "link_address"}
    for role, words in zip(found, (head, worker), strict=False):
        assert found[role].verdict == ("fail" if words else "ok")
        assert (words or "") in found[role].advice
        assert not re.search(r"172\.17|192\.168|docker0", found[role].advice)


def test_what_a_pair_must_share_is_not_judged_by_one_node() -> None:
    found = judge(make_subject(system={"worker": None}, links={"worker": None}))
    assert {check.node for check in found} == {"head"}
    assert {check.verdict for check in found} == {"ok"}


def test_a_healthy_pair_has_nothing_but_good_checks() -> None:
    assert {check.verdict for check in judge(make_subject(needs=NEEDS))} == {"ok"}


def test_without_a_start_only_the_basics_are_judged() -> None:
    found = judge(make_subject(**worker(memory={}, gpu=None)), starting=False)
    assert {check.id for check in found} == {"docker", "docker_group", "tools", "architecture", "python", "sudo"}


@pytest.mark.parametrize("case", read_rows("system", "disks"), ids=row_name)
def test_disks(case: dict[str, Any]) -> None:
    disks = {
        name: DiskFacts(name, raw["device"], raw["free"], 10**13, raw["inodes"], raw["writable"])
        for name, raw in case["disks"].items()
    }
    needs = tuple(DiskNeed(**need) for need in case["needs"])
    found = check_disks(make_subject(system={"head": {"disks": disks}}, needs=needs))
    assert [check.id for check in found if check.verdict == "fail"] == case["failed"]
    assert {check.node for check in found} <= {"head"}


def test_a_disk_that_is_too_small_says_what_needs_how_much() -> None:
    (check,) = judged(make_subject(needs=NEEDS, **worker(disks=disk(free=4 * 10**11))), "disk")
    assert check.observed == "/data: 400.0 GB (372.5 GiB) free, 1000000 inodes"
    assert check.needed == "415.8 GB (387.2 GiB) (weights 413.8 GB (385.4 GiB), and 2.0 GB (1.9 GiB) to spare)"
    assert "SPARKSERVE_MODELS_DIR" in check.advice


def test_a_directory_that_is_not_there_is_made_and_one_that_is_changes_its_owner() -> None:
    for path, exists, hint in (
        ("/data", False, "sudo install -d -o spark /data"),
        ("/data", True, "sudo chown spark /data"),
        ("/my data/x", False, "sudo install -d -o spark '/my data/x'"),
    ):
        subject = make_subject(needs=NEEDS, **worker(disks=disk(writable=False, exists=exists, path=path)))
        assert judged(subject, "writable")[0].hint == hint


def test_failures_are_raised_together() -> None:
    broken = make_subject(**worker(machine="x86_64", docker=DockerFacts("permission"), tools={"docker": None}))
    with pytest.raises(SparkserveError) as caught:
        raise_failures(judge(broken, starting=False))
    errors = flatten(caught.value)
    assert caught.value.exit_code == EXIT_NOT_READY
    assert [(error.code, error.node) for error in errors] == [
        ("check_docker", "worker"), ("check_tools", "worker"), ("check_architecture", "worker")
    ]  # fmt: skip
    assert "usermod -aG docker" in errors[0].hint
    assert errors[1].hint == "sudo apt-get install docker.io"
    raise_failures(judge(make_subject()))


def test_an_unknown_check_names_the_nearest() -> None:
    with pytest.raises(SparkserveError, match=r"there is no check memroy; did you mean memory\?") as caught:
        find_entry("memroy")
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0.0 MB"), (99_999_999, "100.0 MB"), (10**9, "1.0 GB (0.9 GiB)"), (500 * GIB, "536.9 GB (500.0 GiB)")],
)
def test_show_size(size: int, shown: str) -> None:
    assert show_size(size) == shown
