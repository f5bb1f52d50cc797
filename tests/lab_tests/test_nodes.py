"""The lab itself: two nodes that behave like two machines, and nothing left of them afterwards."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.machine import wait_until
from tests.lab.nodes import Lab, LabNode

pytestmark = pytest.mark.lab

CHECKOUT = Path(__file__).parents[2]
ENGINE_OPTIONS = [
    *("--gpus", "all", "--network", "host", "--device", "/dev/infiniband"),
    *("--cap-add", "IPC_LOCK", "--ulimit", "memlock=-1:-1", "--init"),
]
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=3"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    lab = Lab.for_checkout(CHECKOUT)
    was_up = lab.is_up
    lab.up()
    lab.load_base_image()
    yield lab
    if not was_up:
        lab.down()


@pytest.fixture(scope="module")
def trusting_lab(lab: Lab) -> Lab:
    lab.trust_worker()
    return lab


def python_on(node: LabNode, program: str, *arguments: str, user: str = "spark") -> str:
    return node.run(["python3", "-c", program, *arguments], user=user).stdout.decode().strip()


def test_a_second_up_changes_nothing(lab: Lab) -> None:
    before = lab.head.pid
    lab.up()
    assert lab.head.pid == before


def test_the_head_reaches_the_worker_by_key_once_its_host_key_is_known(lab: Lab) -> None:
    lab.head.run(["rm", "-f", f"{lab.head.home}/.ssh/known_hosts"])
    refused = lab.head.run([*SSH, lab.worker.management_address, "hostname"], check=False)
    assert b"Host key verification failed" in refused.stderr
    lab.trust_worker()
    answered = lab.head.run([*SSH, lab.worker.management_address, "hostname; whoami; command -v nvidia-smi sysctl"])
    assert answered.stdout.decode().split() == [
        lab.worker.hostname, "spark", "/usr/local/bin/nvidia-smi", "/usr/sbin/sysctl",
    ]  # fmt: skip


def test_nodes_are_told_apart_by_name_memory_and_processes(lab: Lab) -> None:
    names = [node.run(["hostname"]).stdout for node in lab.nodes]
    assert names[0] != names[1]
    lab.head.run(["touch", "/dev/shm/of-the-head"])
    assert b"of-the-head" not in lab.worker.run(["ls", "/dev/shm"]).stdout
    assert not Path("/dev/shm/of-the-head").exists()
    assert lab.head.run(["cat", "/proc/1/cmdline"]).stdout.endswith(b"node_boot.py\0")


def test_sudo_asks_for_the_password(lab: Lab) -> None:
    lab.head.run(["sudo", "-k"])
    assert lab.head.run(["sudo", "-n", "true"], check=False).returncode == 1
    answer = lab.head.run(["sudo", "-S", "id", "-u"], stdin=f"{lab.head.password}\n".encode())
    assert answer.stdout == b"0\n"


@pytest.mark.parametrize("name", ["head", "worker"])
def test_the_owner_starts_containers_with_the_production_options(lab: Lab, name: str) -> None:
    node = lab.head if name == "head" else lab.worker
    program = "import http.server, json, os, socket, threading; print(*sorted(os.listdir('/dev/infiniband')))"
    output = node.docker("run", "--rm", *ENGINE_OPTIONS, lab.registry_reference, "python3", "-c", program)
    assert output.split() == ["rdma_cm", "uverbs0", "uverbs1", "uverbs2", "uverbs3"]
    calls = [json.loads(line) for line in (node.root / "var/lib/lab/calls.log").read_text().splitlines()]
    assert "nvidia-container-runtime-hook" in {call["command"] for call in calls}


def test_a_container_moves_the_memory_figures(lab: Lab) -> None:
    lab.worker.set_meminfo(MemAvailable=100_000_000)
    program = (
        "import re; p = '/lab/meminfo'; t = open(p).read();"
        "open(p, 'r+').write(re.sub(r'(MemAvailable: +)\\d+', lambda m: m[1] + ' ' + '7' * 8, t))"
    )
    lab.worker.docker("run", "--rm", "-v", "/var/lib/lab:/lab", lab.registry_reference, "python3", "-c", program)
    assert b"77777777 kB" in lab.worker.run(["grep", "MemAvailable", "/proc/meminfo"]).stdout
    assert lab.worker.read_meminfo()["MemAvailable"] == 77_777_777


def test_the_link_carries_jumbo_frames_and_http(lab: Lab) -> None:
    send = (
        "import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
        "s.setsockopt(socket.IPPROTO_IP, 10, 2);"  # IP_MTU_DISCOVER: never fragment
        "s.sendto(bytes(int(sys.argv[2])), (sys.argv[1], 9))"
    )
    python_on(lab.head, send, lab.worker.link_address, "8972")
    too_long = lab.head.run(["python3", "-c", send, lab.worker.link_address, "8973"], check=False)
    assert b"Message too long" in too_long.stderr
    server = lab.worker.popen(
        ["python3", "-m", "http.server", "--bind", lab.worker.link_address, "--directory", "/usr/bin", "8123"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    address = f"http://{lab.worker.link_address}:8123/openssl"
    fetch = ["curl", "-sf", "--retry", "20", "--retry-connrefused", "--retry-delay", "1", address]
    assert lab.head.run(fetch).stdout == Path("/usr/bin/openssl").read_bytes()
    server.terminate()
    assert server.wait(60) == -signal.SIGTERM


def test_an_image_is_built_with_a_run_step_and_shipped_by_digest(trusting_lab: Lab) -> None:
    head, worker = trusting_lab.nodes
    dockerfile = f"FROM {trusting_lab.registry_reference}\nRUN python3 -c 'print({time.time_ns()})' > /made\n"
    name = "127.0.0.1:5000/lab/built:1"
    head.run(["docker", "build", "--tag", name, "-"], stdin=dockerfile.encode())
    pushed = head.docker("push", name)
    digest = next(word for word in pushed.split() if word.startswith("sha256:"))
    tunnel = ["-o", "ExitOnForwardFailure=yes", "-R", "127.0.0.1:5000:127.0.0.1:5000", worker.management_address]
    head.run([*SSH, *tunnel, f"docker pull 127.0.0.1:5000/lab/built@{digest}"])
    layers = ["image", "inspect", "--format", "{{json .RootFS.Layers}}"]
    assert worker.docker(*layers, f"127.0.0.1:5000/lab/built@{digest}") == head.docker(*layers, name)


def test_kernel_settings_change_on_one_node_only(lab: Lab) -> None:
    knob = Path("/proc/sys/vm/swappiness")
    before, other = knob.read_text(), lab.head.run(["cat", str(knob)]).stdout
    changed = {b"0": b"1"}.get(other.strip(), b"0")
    sysctl = ["sysctl", "-w", f"vm.swappiness={changed.decode()}"]
    assert lab.worker.run(sysctl, check=False).returncode != 0
    lab.worker.run(sysctl, user="root")
    lab.worker.run(["sh", "-c", "echo 3 > /proc/sys/vm/drop_caches; echo x > /etc/sysctl.d/90-lab.conf"], user="root")
    assert lab.worker.run(["cat", str(knob)]).stdout.strip() == changed
    assert lab.head.run(["cat", str(knob)]).stdout == other
    assert knob.read_text() == before
    assert not Path("/etc/sysctl.d/90-lab.conf").exists()
    refused = lab.worker.run(["sysctl", "-w", "kernel.pid_max=99999"], user="root", check=False)
    assert refused.returncode != 0


def test_swap_is_taken_away_and_brought_back_on_paper(lab: Lab) -> None:
    lab.worker.run(["swapoff", "-a"], user="root")
    assert lab.worker.run(["cat", "/proc/swaps"]).stdout.count(b"\n") == 1
    assert lab.worker.read_meminfo()["SwapTotal"] == 0
    lab.worker.run(["swapon", "-a"], user="root")
    assert b"/swap.img" in lab.worker.run(["cat", "/proc/swaps"]).stdout
    assert lab.worker.read_meminfo()["SwapFree"] == 16_777_212


def test_rdma_devices_name_their_interface_and_a_different_gid_index_on_each_node(lab: Lab) -> None:
    program = (
        "import json, pathlib as p; devices = p.Path('/sys/class/infiniband').iterdir();"
        "print(json.dumps({d.name: [(d / 'ports/1/state').read_text()[:-1], [*map(str, (d / 'device/net').iterdir())],"
        " {i.name: (d / 'ports/1/gids' / i.name).read_text().strip() for i in (d / 'ports/1/gid_attrs/types').iterdir()"
        " if 'v2' in i.read_text()}] for d in devices}))"
    )
    for node, index in ((lab.head, "3"), (lab.worker, "5")):
        devices = json.loads(python_on(node, program))
        active = {name: rest for name, rest in devices.items() if rest[0] == "4: ACTIVE"}
        assert len(devices) == 4
        assert sorted(Path(rest[1][0]).name for rest in active.values()) == sorted(
            [node.link_interface, node.twin_interface]
        )
        mapped = "".join(f"{int(part):02x}" for part in node.link_address.split("."))
        gid = next(rest[2][index] for rest in active.values() if rest[1][0].endswith(node.link_interface))
        assert gid.replace(":", "").endswith("ffff" + mapped)
        assert (node.root / f"sys/class/net/{node.link_interface}/speed").read_text() == "200000\n"


def test_stub_commands_answer_and_take_planted_answers(lab: Lab) -> None:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,power.draw", "--format=csv,noheader,nounits"]
    assert lab.head.run(query).stdout == b"NVIDIA GB10, [N/A], 11.52\n"
    planted = lab.head.root / "var/lib/lab/answers/nvidia-smi.json"
    planted.write_text('{"name": "Another"}')
    assert lab.head.run(query).stdout.startswith(b"Another, ")
    planted.unlink()
    assert lab.head.run(["systemctl", "is-active", "earlyoom"], check=False).returncode == 3
    assert lab.head.run(["sh", "-c", "command -v earlyoom"], check=False).returncode != 0


def test_a_frozen_ssh_server_keeps_silent_until_it_is_resumed(trusting_lab: Lab) -> None:
    head, worker = trusting_lab.nodes
    worker.pause_sshd()
    try:
        assert head.run([*SSH, worker.management_address, "true"], check=False).returncode == 255
    finally:
        worker.resume_sshd()
    head.run([*SSH, worker.management_address, "true"])
    worker.stop_sshd()
    refused = head.run([*SSH, worker.management_address, "true"], check=False)
    assert b"Connection refused" in refused.stderr
    worker.start_sshd()
    head.run([*SSH, worker.management_address, "true"])


def test_an_engine_that_was_stopped_comes_back_without_running_containers(lab: Lab) -> None:
    lab.worker.docker("run", "--detach", "--init", "--name", "lasting", lab.registry_reference, "sleep", "300")
    lab.worker.stop_docker()
    assert lab.worker.run(["docker", "ps"], check=False).returncode != 0
    lab.worker.start_docker()
    assert lab.worker.docker("ps", "--quiet") == ""
    lab.worker.docker("rm", "lasting")


def test_another_process_finds_the_running_lab(lab: Lab) -> None:
    argv = [sys.executable, "-m", "tests.lab", "exec", "worker", "--user", "root", "--", "sh", "-c", "hostname; id -u"]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [lab.worker.hostname, "0"]


def test_signals_and_time_limits_reach_the_command_inside(lab: Lab) -> None:
    program = ["bash", "-c", "trap 'exit 42' INT; echo ready; while :; do sleep 0.05; done"]
    with lab.head.popen(program, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 42
    with pytest.raises(subprocess.TimeoutExpired):
        lab.head.run(["sleep", "4321"], timeout=0.5)
    wait_until(lambda: lab.head.run(["pgrep", "-f", "^sleep 4321"], check=False).returncode == 1, "end of sleep", 60)


def test_the_owner_runs_the_python_of_the_checkout(lab: Lab) -> None:
    lab.head.run([sys.executable, "-c", "import typer"])
