"""A check-up on two real nodes: in order, beside a serving pair, without settings, with one thing broken at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sparkserve.blueprint import load_facts
from tests.e2e.refusal import MODELS, connections, look
from tests.e2e.test_bad_input import known_hosts, squatter
from tests.e2e.test_init import type_to
from tests.lab.node import LabNode
from tests.lab.nodes import Lab
from tests.lab.pair import HOME, SOURCE, TOKEN, Pair

pytestmark = pytest.mark.lab
RECIPE = f"{HOME}/recipes/lab"
ROLES = ("head", "worker")
PAIRED = {
    "clock",
    "same_machine",
    "driver_match",
    "kernel_match",
    "docker_match",
    "link_mtu",
    "link_network",
    "link_same",
}


def examined(pair: Pair, *words: str) -> dict[str, Any]:
    """Check up, which must change nothing."""
    before = look(pair)
    answer = pair.ask("doctor", *words)
    assert look(pair) == before
    assert answer["command"] == "doctor"
    return answer


def verdicts(answer: dict[str, Any], name: str) -> dict[str, str]:
    return {check["node"]: check["verdict"] for check in answer["data"]["checks"] if check["id"] == name}


def told(answer: dict[str, Any], name: str, node: str) -> dict[str, str]:
    wrong = {"fail": 0, "unseen": 1, "warn": 2, "ok": 3}
    found = [check for check in answer["data"]["checks"] if (check["id"], check["node"]) == (name, node)]
    worst: dict[str, str] = min(found, key=lambda check: wrong[check["verdict"]])
    return worst


# -- in order ---------------------------------------------------------------------------------------------------------


def test_a_pair_in_order_over_one_connection(pair: Pair) -> None:
    before = connections(pair)
    answer = examined(pair)
    assert connections(pair) - before == 1
    assert answer["exit_code"] == 0, answer["data"]["verdict"]
    checks = answer["data"]["checks"]
    assert {check["verdict"] for check in checks} == {"ok"}
    assert {check["id"] for check in checks if not check["node"]} == PAIRED
    by_node = [{check["id"] for check in checks if check["node"] == role} for role in ROLES]
    assert by_node[0] - by_node[1] == {"api_key"}
    assert by_node[1] <= by_node[0]
    # The stand-in of every lab node maps its own name to loopback, as Ubuntu does.
    assert "127.0.1.1" in told(answer, "hostname", "worker")["observed"]


def test_a_person_sees_both_nodes_side_by_side_and_what_differs(pair: Pair) -> None:
    pair.worker.set_meminfo(MemAvailable=50_000_000)
    (pair.worker.root / "var/lib/lab/answers/nvidia-smi.json").write_text('{"driver_version": "590.44"}')
    try:
        answer = pair.sparkserve("doctor")
    finally:
        (pair.worker.root / "var/lib/lab/answers/nvidia-smi.json").unlink()
    lines = answer.stdout.decode().splitlines()
    assert answer.returncode == 1
    assert lines[0].split() == ["verdict", "check", "head", "worker", "needed"]
    assert lines[1].split()[:2] == ["fail", "memory"]
    assert "121.9 GB (113.5 GiB)" in lines[1]
    assert "51.2 GB (47.7 GiB)" in lines[1]
    assert lines[2].split()[:2] == ["warn", "driver_match"]
    assert "memory (worker): close other programs: `ps aux --sort=-rss | head` shows the largest" in lines
    assert [line.split() for line in lines if line.startswith("driver ")] == [["driver", "580.173.02", "590.44"]]
    assert not any(line.startswith("ok ") for line in lines)
    assert lines[-1].startswith("1 fail, 1 warn, ")


def test_beside_a_serving_pair(serving: Pair) -> None:
    answer = examined(serving, "--link")
    assert told(answer, "port", "head")["observed"] == "port 8888 (api): held by our own rank"
    assert "beside the rank that runs" in told(answer, "memory", "worker")["observed"]
    assert verdicts(answer, "link_tcp") == {"head": "ok", "worker": "ok"}
    # How much a busy machine's cable carries is the matter of other tests.
    bad = {check["id"] for check in answer["data"]["checks"] if check["verdict"] != "ok"}
    assert bad <= {"link_bandwidth", "link_rdma_bandwidth", "sudo"}
    assert serving.ask("status")["exit_code"] == 0


def test_the_cable_is_proved_over_the_same_connection(pair: Pair) -> None:
    before = connections(pair)
    answer = examined(pair, "--link")
    assert connections(pair) - before == 1
    assert verdicts(answer, "link_mtu_path") == {"head": "ok", "worker": "ok"}


# -- without settings -------------------------------------------------------------------------------------------------


@contextmanager
def without_settings(pair: Pair) -> Iterator[str]:
    pair.head.run(["rm", "-f", f"{HOME}/.env"])
    try:
        yield f"spark@{pair.worker.management_address}"
    finally:
        pair.write_settings()


def test_a_worker_that_no_settings_name(pair: Pair) -> None:
    with without_settings(pair) as worker:
        answer = examined(pair, worker, "--recipe", RECIPE)
        nobody = pair.ask("doctor")
    assert answer["exit_code"] == 0
    assert [told(answer, "link_address", role)["observed"] for role in ROLES] == [
        f"{node.link_interface} owns {node.link_address}" for node in pair.lab.nodes
    ]
    assert {check["id"] for check in answer["data"]["checks"] if check["verdict"] != "ok"} == {"sudo"}
    assert (nobody["exit_code"], nobody["errors"][0]["code"]) == (2, "worker_unset")


def test_what_is_recorded_names_nobody_and_draws_the_same_plan(pair: Pair, tmp_path: Path) -> None:
    answer = pair.ask("doctor", "--record", "facts.json")
    assert answer["data"]["recorded"] == "facts.json"
    text = pair.head.run(["cat", "facts.json"]).stdout.decode()
    addresses = [one for node in pair.lab.nodes for one in (node.management_address, node.link_address)]
    gids = ["".join(f"{int(part):02x}" for part in one.split(".")) for one in addresses]
    gids = [f"{one[:4]}:{one[4:]}" for one in gids]
    names = [node.hostname for node in pair.lab.nodes]
    for word in (*addresses, *gids, *names, "/home/spark", "spark docker", "GPU-", TOKEN, pair.head.password):
        assert word not in text, word
    file = tmp_path / "facts.json"
    file.write_text(text)
    seen = load_facts(file)
    assert {place.gid_index for place in seen.nodes.values()} == {3, 5}
    plan = pair.ask("plan", "--facts", "facts.json")
    assert plan["exit_code"] == 0
    assert seen.nodes["head"].address in json.dumps(plan["data"])
    unknown = {name for rank in plan["data"]["ranks"] for name in rank["unresolved"]}
    assert not {name for name in unknown if ".link." in name}


# -- a start ----------------------------------------------------------------------------------------------------------


def test_a_start_goes_on_although_a_check_fails_and_remembers_it(prepared: Pair) -> None:
    for node in prepared.lab.nodes:
        node.set_meminfo(MemAvailable=110_000_000)  # too little by the recipe, and enough for the stand-in
    refused = prepared.ask("start")
    assert [error["code"] for error in refused["errors"]] == ["check_memory"] * 2
    unknown = prepared.ask("start", "--skip-check", "memroy")
    assert (unknown["exit_code"], "did you mean memory?" in unknown["errors"][0]["message"]) == (2, True)
    with memory(prepared.worker, SwapTotal=0):
        answer = prepared.sparkserve("start", "--skip-check", "memory")
    assert answer.returncode == 0, answer.stderr
    # Of all checks that were made just those that are not in order are shown.
    on_head, told_of, swap = [line for line in answer.stderr.decode().splitlines() if "warning: check " in line]
    assert on_head.startswith("warning: check memory (skipped), head: ")
    assert told_of.startswith("warning: check memory (skipped), worker: 112.6 GB (104.9 GiB)")
    assert told_of.endswith("; close other programs: `ps aux --sort=-rss | head` shows the largest")
    assert swap.startswith("warning: check swap, worker: no swap; better: swap that is there")
    run = prepared.ask("history")["data"]["runs"][0]["run"]
    record = json.loads((prepared.head.root / f"{HOME[1:]}/.local/state/sparkserve/runs/{run}/record.json").read_text())
    assert record["decided"]["skipped checks"] == "memory"


# -- one thing broken at a time ---------------------------------------------------------------------------------------


@contextmanager
def planted(node: LabNode, name: str, text: str) -> Iterator[None]:
    """Let a stand-in command answer otherwise."""
    file = node.root / "var/lib/lab/answers" / name
    file.write_text(text)
    try:
        yield
    finally:
        file.unlink()


@contextmanager
def moved(node: LabNode, path: str) -> Iterator[None]:
    node.run(["mv", path, f"{path}.away"], user="root")
    try:
        yield
    finally:
        node.run(["mv", f"{path}.away", path], user="root")


@contextmanager
def mode(node: LabNode, path: str, bad: str, good: str) -> Iterator[None]:
    node.run(["chmod", bad, path], user="root")
    try:
        yield
    finally:
        node.run(["chmod", good, path], user="root")


@contextmanager
def memory(node: LabNode, **kib: int) -> Iterator[None]:
    kept = node.read_meminfo()
    node.set_meminfo(**kib)
    try:
        yield
    finally:
        node.set_meminfo(**{name: kept[name] for name in kib})


@contextmanager
def without_docker(node: LabNode) -> Iterator[None]:
    node.stop_docker()
    try:
        yield
    finally:
        node.start_docker()


@contextmanager
def models_on(node: LabNode, options: str) -> Iterator[None]:
    node.run(["mkdir", "-p", MODELS])
    node.run(["mount", "-t", "tmpfs", "-o", options, "none", MODELS], user="root")
    try:
        yield
    finally:
        node.run(["umount", MODELS], user="root")


@contextmanager
def swapped(node: LabNode) -> Iterator[None]:
    file = node.files / "lab/swaps"
    kept = file.read_text()
    file.write_text(kept.replace("\t0\t", "\t9000000\t"))
    try:
        yield
    finally:
        file.write_text(kept)


# Clock and kernel are the machine's own: the node's python3 tells of others, as far as our program asks.
CLOCK = "import time; now = time.time; time.time = lambda: now() + 600"
KERNEL = "import platform; platform.release = lambda: '7.0.0-1019-nvidia'"
WRAPPER = """#!/bin/sh
[ "$1 $2" = "-I -c" ] && exec /usr/bin/python3 -I -c "{patch}
$3"
exec /usr/bin/python3 "$@"
"""


@contextmanager
def patched(node: LabNode, patch: str) -> Iterator[None]:
    """Let the node's python3 begin with some lines of ours."""
    path = "/usr/local/bin/python3"
    node.run(["install", "-m", "755", "/dev/stdin", path], user="root", stdin=WRAPPER.format(patch=patch).encode())
    try:
        yield
    finally:
        node.run(["rm", path], user="root")


@contextmanager
def with_its_sign(node: LabNode) -> Iterator[None]:
    with patched(node, KERNEL), memory(node, CmaFree=900_000):
        yield


@contextmanager
def no_docker_group(node: LabNode) -> Iterator[None]:
    """Take the owner out of the group; sessions that begin now are no members."""
    node.run(["gpasswd", "-d", "spark", "docker"], user="root")
    try:
        yield
    finally:
        node.run(["gpasswd", "-a", "spark", "docker"], user="root")


@contextmanager
def foreign_container(node: LabNode, *options: str) -> Iterator[None]:
    image = Lab.for_checkout(SOURCE).registry_reference
    node.docker("run", "--detach", "--name", "web", *options, image, "python3", "-c", "import time; time.sleep(600)")
    try:
        yield
    finally:
        node.docker("rm", "--force", "web")


@dataclass(frozen=True)
class Fault:
    """What is broken, the check that tells, its verdict, words of what is seen, what else is then not in order."""

    breaks: Callable[[LabNode], AbstractContextManager[None]]
    name: str
    verdict: str
    words: str
    more: frozenset[str] = frozenset()


APPS = '[{"pid": "4711", "process_name": "python3", "used_memory": "9 MiB"}]'
HOOK = "/usr/local/bin/nvidia-container-runtime-hook"
DOCKER = frozenset({"docker_match", "docker_runtime", "containers"})
GPU = frozenset({"driver_match", "gpu_processes"})
SMI = "/usr/local/bin/nvidia-smi"
FAULTS = [
    Fault(without_docker, "docker", "fail", "its socket is missing", DOCKER),
    Fault(lambda node: mode(node, "/var/run/docker.sock", "600", "660"), "docker", "fail", "may not use", DOCKER),
    Fault(no_docker_group, "docker_group", "fail", "spark is no member", DOCKER | {"docker"}),
    Fault(lambda node: moved(node, HOOK), "docker_runtime", "fail", "no nvidia-container-runtime-hook"),
    Fault(lambda node: moved(node, "/usr/bin/rsync"), "tools", "ok", "all tools there"),
    Fault(lambda node: moved(node, "/usr/bin/sudo"), "sudo", "warn", "sudo: missing"),
    Fault(lambda node: moved(node, SMI), "gpu", "fail", "missing", GPU),
    Fault(lambda node: planted(node, "nvidia-smi.exit", "124"), "gpu", "unseen", "no answer", GPU),
    Fault(lambda node: planted(node, "compute-apps.json", APPS), "gpu_processes", "warn", "python3 (process 4711)"),
    Fault(lambda node: memory(node, CmaFree=900_000), "kernel", "warn", "is more than CmaTotal"),
    Fault(lambda node: memory(node, MemFree=3_000_000), "page_cache", "warn", "3.1 GB (2.9 GiB) free"),
    Fault(lambda node: memory(node, MemAvailable=90_000_000), "memory", "fail", "92.2 GB (85.8 GiB)"),
    Fault(lambda node: memory(node, SwapTotal=0), "swap", "warn", "no swap"),
    Fault(lambda node: planted(node, "systemctl.out", "active\nactive\n"), "oom_daemons", "warn", "oomd and earlyoom"),
    Fault(lambda node: patched(node, CLOCK), "clock", "warn", "s ahead"),
    Fault(lambda node: patched(node, KERNEL), "kernel", "warn", "RDMA was seen to fail", frozenset({"kernel_match"})),
    Fault(with_its_sign, "kernel", "fail", "is more than CmaTotal", frozenset({"kernel_match"})),
    Fault(swapped, "swap", "warn", "9.2 GB (8.6 GiB) of"),
    Fault(lambda node: models_on(node, "size=1m,uid=1000"), "disk", "fail", "1.0 MB free"),
    Fault(lambda node: models_on(node, "size=9g,nr_inodes=200,uid=1000"), "disk", "fail", "inodes"),
    Fault(lambda node: models_on(node, "size=9g,mode=755"), "writable", "fail", "cannot be written"),
    Fault(lambda node: foreign_container(node, "-p", "8888:80"), "port", "fail", "held by container web ("),
    Fault(lambda node: foreign_container(node, "--network=host"), "containers", "warn", "on the host's network: web"),
    Fault(lambda node: foreign_container(node, "--device=/dev/infiniband"), "containers", "warn", "web was given RDMA"),
    Fault(lambda node: squatter(node, "127.0.0.1", 8888), "port", "fail", "held by python3 (process"),
]
# The head is looked at by another way than the worker: those whose facts come from beyond files and tools.
BOTH = {"docker", "disk", "port"}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "role"),
    [(fault, role) for fault in FAULTS for role in ROLES if role == "worker" or fault.name in BOTH],
    ids=lambda item: f"{item.name}: {item.words}" if isinstance(item, Fault) else item,
)
def test_one_thing_that_is_broken(pair: Pair, fault: Fault, role: str) -> None:
    pair.lab.load_base_image()
    if fault.name in ("disk", "writable"):
        pair.forget_everything()  # or nothing would have to be written
    with fault.breaks(getattr(pair, role)):
        answer = pair.ask("doctor")
    found = told(answer, fault.name, "" if fault.name in PAIRED else role)
    assert (found["verdict"], fault.words in found["observed"]) == (fault.verdict, True), found
    assert bool(found["hint"]) is (fault.verdict != "ok")
    assert found["why"]
    wrong = [check for check in answer["data"]["checks"] if check["verdict"] != "ok"]
    assert {check["id"] for check in wrong} - fault.more == ({fault.name} if fault.verdict != "ok" else set())
    assert {check["node"] for check in wrong} <= {role, ""}
    assert answer["exit_code"] == {"ok": 0, "warn": 0, "fail": 1, "unseen": 6}[fault.verdict]


@pytest.mark.faults
def test_a_hostname_on_loopback_beside_a_recipe_that_pins_no_interface(pair: Pair) -> None:
    assert pair.ask("recipes", "new", "open")["exit_code"] == 0
    try:
        pair.head.run(["sed", "-i", "/_SOCKET_IFNAME\\|VLLM_HOST_IP/d", "open/recipe.toml"])
        answer = pair.ask("doctor", "--recipe", "./open")
    finally:
        pair.head.run(["rm", "-r", "open"])
    assert verdicts(answer, "hostname") == {"head": "warn", "worker": "warn"}
    found = told(answer, "hostname", "worker")
    assert "resolves to 127.0.1.1" in found["observed"]
    assert "NCCL_SOCKET_IFNAME" in found["hint"]


# -- a worker that cannot be looked at --------------------------------------------------------------------------------


@contextmanager
def without_sshd(pair: Pair) -> Iterator[None]:
    pair.worker.stop_sshd()
    try:
        yield
    finally:
        pair.worker.start_sshd()


@contextmanager
def frozen_sshd(pair: Pair) -> Iterator[None]:
    pair.worker.pause_sshd()
    try:
        yield
    finally:
        pair.worker.resume_sshd()


@contextmanager
def only_a_password(pair: Pair) -> Iterator[None]:
    """Let sshd ask for the password, and know no key."""
    config = "/etc/ssh/sshd_config"
    edit = ["sed", "-i", "/^PasswordAuthentication/s/no/yes/;/^KbdInteractive/s/no/yes/", config]
    with moved(pair.worker, f"{HOME}/.ssh/authorized_keys"):
        pair.worker.run(["cp", config, f"{config}.kept"], user="root")
        pair.worker.run(edit, user="root")
        restart_sshd(pair)
        try:
            yield
        finally:
            pair.worker.run(["mv", f"{config}.kept", config], user="root")
            restart_sshd(pair)


def restart_sshd(pair: Pair) -> None:
    pair.worker.stop_sshd()
    pair.worker.start_sshd()


@contextmanager
def locked_key(pair: Pair) -> Iterator[None]:
    key = f"{HOME}/.ssh/id_ed25519"
    pair.head.run(["ssh-keygen", "-q", "-p", "-P", "", "-N", "a phrase", "-f", key])
    try:
        yield
    finally:
        pair.head.run(["ssh-keygen", "-q", "-p", "-P", "a phrase", "-N", "", "-f", key])


@contextmanager
def too_many_keys(pair: Pair) -> Iterator[None]:
    """Offer more keys than sshd lets be tried before the right one."""
    names = [f"{HOME}/.ssh/other{number}" for number in range(7)]
    for name in names:
        pair.head.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name])
    lines = "".join(f"IdentityFile {name}\n" for name in (*names, f"{HOME}/.ssh/id_ed25519"))
    pair.write(f"{HOME}/.ssh/config", lines, mode="600")
    try:
        yield
    finally:
        pair.head.run(["sh", "-c", "rm -f ~/.ssh/config ~/.ssh/other*"])


UNREACHED: list[tuple[Callable[[Pair], AbstractContextManager[None]], str, str]] = [
    (without_sshd, "reach", "Connection refused"),
    (frozen_sshd, "reach", "SSH"),
    (only_a_password, "reach", "refuses us"),
    (locked_key, "reach", "refuses us"),
    (too_many_keys, "reach", "hung up while keys were offered"),
    (lambda pair: known_hosts(pair, ""), "reach", "is not in known_hosts"),
    (lambda pair: moved(pair.worker, "/usr/bin/python3"), "python", "python3 is not there"),
]


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "name", "words"), UNREACHED)
def test_a_worker_that_cannot_be_looked_at(
    pair: Pair, fault: Callable[[Pair], AbstractContextManager[None]], name: str, words: str
) -> None:
    with fault(pair):
        answer = pair.ask("doctor")
    assert answer["exit_code"] == 6
    (found,) = [check for check in answer["data"]["checks"] if check["node"] == "worker"]
    assert (found["id"], found["verdict"]) == (name, "unseen")
    assert words in found["observed"]
    assert found["hint"]
    on_head = [check for check in answer["data"]["checks"] if check["node"] == "head"]
    assert len(on_head) > 20
    assert {check["verdict"] for check in on_head} == {"ok"}


@pytest.mark.faults
def test_the_worker_is_the_head_under_another_name(pair: Pair) -> None:
    answer = pair.ask("doctor", f"spark@{pair.head.management_address}")
    (error,) = answer["errors"]
    assert (answer["exit_code"], error["code"]) == (2, "worker_is_head")


# -- what it may put right --------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_host_key_is_trusted_by_a_person_and_the_worker_then_looked_at(pair: Pair) -> None:
    with known_hosts(pair, ""):
        code, screen = type_to(pair, "y\n", "doctor", "--fix", "--yes")
        again = pair.ask("doctor")["exit_code"]
    assert code == 0, screen
    assert screen.count("Trust this key from now on") == 1
    assert again == 0
    assert " ok, in " in screen


@pytest.mark.faults
def test_a_directory_is_made_after_asking(pair: Pair) -> None:
    place = "/srv/models"
    pair.write_settings(SPARKSERVE_MODELS_DIR=place)
    refused = pair.sparkserve("doctor", "--fix")
    assert refused.returncode == 2
    assert "add --yes" in refused.stderr.decode()
    planned = pair.sparkserve("doctor", "--fix", "--dry-run", "--record", "planned.json")
    told = [line for line in planned.stderr.decode().splitlines() if line.startswith("would be done: ")]
    assert [place in line for line in told] == [True, True, False], told
    assert told[2] == "would be done: head: write planned.json"
    for node in pair.lab.nodes:
        assert node.run(["ls", place, "planned.json"], check=False).stdout == b""
    before = connections(pair)
    answer = pair.ask("doctor", "--fix", "--yes")
    assert connections(pair) - before == 1
    owners = [node.run(["stat", "-c", "%U", place]).stdout.decode().strip() for node in pair.lab.nodes]
    for node in pair.lab.nodes:
        node.run(["rm", "-rf", place], user="root")
    assert answer["exit_code"] == 0
    assert owners == ["spark", "spark"]


@pytest.mark.faults
def test_a_sudo_rule_is_written_for_review_and_is_enough_to_tune(pair: Pair) -> None:
    pair.write_settings(SPARKSERVE_SUDO_PASSWORD_FILE=None)
    assert pair.ask("doctor", "--fix", "--yes")["exit_code"] == 0
    rules = {node.name: f"{HOME}/.local/state/sparkserve/sudoers-{node.name}" for node in pair.lab.nodes}
    try:
        for node in pair.lab.nodes:
            text = pair.head.run(["cat", rules[node.name]]).stdout
            node.run(["visudo", "-c", "-f", "-"], user="root", stdin=text)
            node.run(["install", "-D", "-m", "440", "/dev/stdin", "/etc/sudoers.d/sparkserve"], user="root", stdin=text)
            node.run(["sh", "-c", "echo '@includedir /etc/sudoers.d' >> /etc/sudoers"], user="root")
        assert pair.ask("tune")["exit_code"] == 0
        assert pair.ask("tune", "--undo")["exit_code"] == 0
        pair.worker.run(["sed", "-i", "s#/usr/sbin/sysctl#/usr/bin/sysctl#", "/etc/sudoers.d/sparkserve"], user="root")
        found = {one["node"]: one["observed"] for one in pair.ask("doctor")["data"]["checks"] if one["id"] == "sudo"}
        assert found["head"] == "sudo: free"
        assert found["worker"].startswith("sudo: password for `sysctl -q -w ")
        assert pair.worker.run(["sudo", "-n", "cat", "/etc/shadow"], check=False).returncode != 0
        assert pair.worker.run(["sudo", "-n", "sysctl", "-q", "-w", "kernel.panic=1"], check=False).returncode != 0
    finally:
        for node in pair.lab.nodes:
            node.run(["sed", "-i", "/^@includedir/d", "/etc/sudoers"], user="root")
            node.run(["rm", "-f", "/etc/sudoers.d/sparkserve"], user="root")
