"""Bad input and a bad start: one clear error each, the exit code of the design, and nothing changed on either node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.refusal import MODELS, codes, look, refused
from tests.lab.node import LabNode
from tests.lab.pair import HOME, TOKEN, Pair

pytestmark = pytest.mark.lab


SQUATTER = """
import socket, sys, time
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
time.sleep(600)
"""


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["up", "status", "stop", "logs"])
def test_no_settings_file(unlocked: Pair, command: str) -> None:
    unlocked.head.run(["rm", "-f", f"{HOME}/.env"])
    code, errors = refused(unlocked, command)
    assert (code, codes(errors)) == (2, [("worker_unset", "")])
    assert "sparkserve init" in errors[0]["hint"]


def test_a_named_settings_file_that_is_not_there(pair: Pair) -> None:
    code, errors = refused(pair, "up", "--env-file", "nosuch.env")
    assert (code, codes(errors)) == (2, [("settings_missing", "")])
    assert "nosuch.env" in errors[0]["message"]


def test_a_broken_settings_file_is_told_in_one_go(unlocked: Pair) -> None:
    lines = ["SPARKSERVE_WORKER", "SPARKSERVE_WROKER=x", "SPARKSERVE_API_PORT=abc", "SPARKSERVE_WORKER_LINK=nope"]
    unlocked.write(f"{HOME}/.env", "\n".join([*lines, f"HF_TOKEN='{TOKEN}"]))
    code, errors = refused(unlocked, "up")
    assert code == 2
    assert [error["code"] for error in errors] == [
        "settings_syntax", "settings_syntax", "settings_unknown", "settings_invalid", "settings_invalid",
    ]  # fmt: skip
    assert errors[0]["message"] == ".env, line 1 should be NAME=value"
    assert "did you mean SPARKSERVE_WORKER?" in errors[2]["message"]


def test_a_settings_file_that_is_no_text(unlocked: Pair) -> None:
    unlocked.write(f"{HOME}/.env", b"\xff\xfe\x00")
    code, errors = refused(unlocked, "up")
    assert (code, codes(errors)) == (2, [("settings_unreadable", "")])


def test_a_person_reads_what_where_and_the_next_command(unlocked: Pair) -> None:
    unlocked.write_settings(SPARKSERVE_WROKER="x")
    answer = unlocked.sparkserve("up")
    assert answer.returncode == 2
    assert answer.stdout == b""
    assert answer.stderr.decode().splitlines() == [
        "error: unknown key SPARKSERVE_WROKER in .env; did you mean SPARKSERVE_WORKER?",
        "hint: `sparkserve config` lists them",
    ]


# -- the worker -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["up", "status", "stop", "logs"])
def test_a_worker_that_refuses_the_connection(locked: Pair, command: str) -> None:
    locked.worker.stop_sshd()
    before = look(locked)
    try:
        answer = locked.ask(command)
    finally:
        locked.worker.start_sshd()
    assert answer["exit_code"] == 6
    assert "port 22: Connection refused" in json.dumps(answer)
    assert [node for node in {error["node"] for error in answer["errors"]} if node != "worker"] == []
    assert look(locked) == before


@pytest.mark.parametrize(
    ("worker", "code"), [("spark@nosuchname.test", "ssh_unreachable"), ("nobody@{worker}", "ssh_auth")]
)
def test_a_worker_that_is_not_there_or_not_ours(pair: Pair, worker: str, code: str) -> None:
    pair.write_settings(SPARKSERVE_WORKER=worker.format(worker=pair.worker.management_address))
    exit_code, errors = refused(pair, "tune")
    assert (exit_code, codes(errors)) == (6, [(code, "worker")])


@contextmanager
def known_hosts(pair: Pair, text: str) -> Iterator[None]:
    path = f"{HOME}/.ssh/known_hosts"
    kept = pair.head.run(["cat", path]).stdout
    pair.write(path, text, mode="600")
    try:
        yield
    finally:
        pair.write(path, kept, mode="600")


def test_an_unknown_host_key_is_shown_and_not_trusted(pair: Pair) -> None:
    with known_hosts(pair, ""):
        code, errors = refused(pair, "tune")
    assert (code, codes(errors)) == (6, [("host_key_unknown", "worker")])
    assert "SHA256:" in errors[0]["message"]


def test_a_changed_host_key_is_told_with_both_fingerprints(pair: Pair) -> None:
    other = pair.head.run(["cat", f"{HOME}/.ssh/id_ed25519.pub"]).stdout.decode()
    with known_hosts(pair, f"{pair.worker.management_address} {other}"):
        code, errors = refused(pair, "tune")
    assert (code, codes(errors)) == (6, [("host_key_changed", "worker")])
    assert errors[0]["message"].count("SHA256:") == 2
    assert "ssh-keygen -R" in errors[0]["hint"]


# -- Docker, disks, ports, root ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["head", "worker"])
def test_no_docker_engine(locked: Pair, role: str) -> None:
    node: LabNode = getattr(locked, role)
    node.stop_docker()
    try:
        code, errors = refused(locked, "up")
        state = locked.ask("status")
    finally:
        node.start_docker()
    assert (code, codes(errors)) == (3, [("docker_unreachable", role)])
    assert "systemctl start docker" in errors[0]["hint"]
    assert (state["exit_code"], state["data"]["state"]) == (6, "unknown")


@pytest.mark.parametrize("role", ["head", "worker"])
def test_a_docker_engine_that_is_closed_to_us(locked: Pair, role: str) -> None:
    node: LabNode = getattr(locked, role)
    node.run(["chmod", "600", "/var/run/docker.sock"], user="root")
    try:
        code, errors = refused(locked, "up")
    finally:
        node.run(["chmod", "660", "/var/run/docker.sock"], user="root")
    assert (code, codes(errors)) == (3, [("docker_unreachable", role)])
    assert "usermod -aG docker" in errors[0]["hint"]


@contextmanager
def small_disk(node: LabNode) -> Iterator[None]:
    node.run(["mkdir", "-p", MODELS])
    node.run(["mount", "-t", "tmpfs", "-o", "size=1m,uid=1000", "none", MODELS], user="root")
    try:
        yield
    finally:
        node.run(["umount", MODELS], user="root")


@pytest.mark.parametrize("role", ["head", "worker"])
def test_a_full_disk_is_told_before_the_first_byte(locked: Pair, role: str) -> None:
    with small_disk(getattr(locked, role)):
        code, errors = refused(locked, "download")
        served = [request for request in locked.hub.log() if request["host"] == "content"]
    assert (code, codes(errors)) == (3, [("check_disk", role)])
    assert MODELS in errors[0]["message"]
    assert "GB (" in errors[0]["message"]
    assert served == []


@contextmanager
def squatter(node: LabNode, address: str, port: int) -> Iterator[None]:
    argv = ["python3", "-c", SQUATTER, address, str(port)]
    with node.popen(argv, stdout=-1) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        try:
            yield
        finally:
            process.kill()


def test_ports_that_a_stranger_holds(prepared: Pair) -> None:
    with squatter(prepared.head, "127.0.0.1", 8888), squatter(prepared.worker, "0.0.0.0", 8888):
        code, errors = refused(prepared, "start")
    assert (code, codes(errors)) == (3, [("check_port", "head"), ("check_port", "worker")])
    assert "8888" in errors[0]["message"]
    assert "SPARKSERVE_API_PORT" in errors[0]["hint"]


def test_the_meeting_port_on_the_cable(prepared: Pair) -> None:
    prepared.write_settings(SPARKSERVE_MASTER_PORT="29777")
    with squatter(prepared.head, prepared.head.link_address, 29777):
        code, errors = refused(prepared, "start")
    assert (code, codes(errors)) == (3, [("check_port", "head")])
    assert "SPARKSERVE_MASTER_PORT" in errors[0]["hint"]


def test_too_little_memory_on_both_nodes(prepared: Pair) -> None:
    for node in prepared.lab.nodes:
        node.set_meminfo(MemAvailable=50_000_000)
    code, errors = refused(prepared, "start")
    assert (code, codes(errors)) == (3, [("check_memory", "head"), ("check_memory", "worker")])


@pytest.mark.parametrize(("password", "code"), [(None, "check_sudo"), ("wrong", "sudo_password")])
def test_the_sudo_password_is_missing_or_wrong(prepared: Pair, password: str | None, code: str) -> None:
    assert prepared.ask("tune", "--undo")["exit_code"] == 0
    file = f"{HOME}/.wrong-password"
    prepared.write(file, f"{password}\n", mode="600")
    prepared.write_settings(SPARKSERVE_SUDO_PASSWORD_FILE=password and file)
    try:
        exit_code, errors = refused(prepared, "up")
    finally:
        prepared.write_settings()
        assert prepared.ask("tune")["exit_code"] == 0
    assert (exit_code, codes(errors)) == (3, [(code, "head"), (code, "worker")])
    assert "SPARKSERVE_SUDO_PASSWORD_FILE" in errors[0]["hint"]


def test_a_password_file_that_others_can_read(pair: Pair) -> None:
    pair.head.run(["chmod", "644", f"{HOME}/.sudo-password"])
    try:
        code, errors = refused(pair, "tune", "--undo")
    finally:
        pair.head.run(["chmod", "600", f"{HOME}/.sudo-password"])
    assert (code, codes(errors)) == (2, [("secret_readable", "")])
