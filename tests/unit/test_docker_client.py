from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import docker.errors
import pytest
from docker.transport.sshconn import SSHHTTPAdapter

from sparkserve.docker_client import explained, local_client, remote_client
from sparkserve.errors import EXIT_NOT_READY, SparkserveError
from tests.unit.sshd import Client, Sshd, make_client, running_sshd

# `docker system dial-stdio` of a node: HTTP on its own two streams.
DIAL_STDIO = """#!/usr/bin/python3
import json, sys
assert sys.argv[1:] == ["system", "dial-stdio"], sys.argv
while head := sys.stdin.buffer.readline():
    method, path, _ = head.split()
    while sys.stdin.buffer.readline().strip():
        pass
    good = path.endswith(b"/version")
    answer = {"ApiVersion": "1.48", "Version": "28.3.3"} if good else {"message": "the daemon's words"}
    body = json.dumps(answer).encode()
    status = b"200 OK" if good else b"409 Conflict"
    sys.stdout.buffer.write(b"HTTP/1.1 %s\\r\\nContent-Type: application/json\\r\\n" % status)
    sys.stdout.buffer.write(b"Content-Length: %d\\r\\n\\r\\n%s" % (len(body), body))
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "docker").write_text(DIAL_STDIO)
    (tools / "docker").chmod(0o755)
    with running_sshd(tmp_path / "server", SetEnv=f"PATH={tools}:/usr/bin:/bin") as found:
        yield found


@pytest.fixture
def client(tmp_path: Path, server: Sshd, monkeypatch: pytest.MonkeyPatch) -> Client:
    return make_client(tmp_path, server, monkeypatch)


def test_the_overridden_methods_are_still_those_of_the_package() -> None:
    assert {"_create_paramiko_client", "_connect"} <= set(vars(SSHHTTPAdapter))


def test_the_worker_s_engine_over_the_one_connection(client: Client, server: Sshd) -> None:
    host = client.connect()
    engine = remote_client(host)
    assert engine.version()["Version"] == "28.3.3"
    assert engine.api.api_version == "1.48"
    with pytest.raises(SparkserveError) as caught, explained("worker"):
        engine.containers.list()
    assert (caught.value.code, caught.value.node) == ("docker_refused", "worker")
    assert "the daemon's words" in caught.value.details
    engine.close()
    assert host.run(["echo", "still here"]).text == "still here"
    host.close()
    assert server.connections == 1


@pytest.mark.filterwarnings("ignore:.*socket.socket:pytest.PytestUnraisableExceptionWarning")
def test_no_engine_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SparkserveError) as caught:
        local_client("head")
    assert (caught.value.code, caught.value.node, caught.value.exit_code) == (
        "docker_unreachable",
        "head",
        EXIT_NOT_READY,
    )
    del caught
    gc.collect()  # docker's package leaves the socket that could not connect to the garbage collector


def test_bugs_are_not_dressed_up() -> None:
    with pytest.raises(ZeroDivisionError), explained("head"):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (docker.errors.APIError("x", explanation="why"), "docker_refused"),
        (docker.errors.NotFound("x"), "docker_refused"),
        (docker.errors.DockerException("x"), "docker_unreachable"),
        (ConnectionResetError(104, "reset"), "docker_unreachable"),
    ],
)
def test_errors_become_ours(error: Exception, code: str) -> None:
    with pytest.raises(SparkserveError) as caught, explained("worker"):
        raise error
    assert (caught.value.code, caught.value.node) == (code, "worker")
