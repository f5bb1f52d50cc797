from __future__ import annotations

import concurrent.futures
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from pathlib import Path

import pytest

from sparkserve.cluster import NodeSession
from sparkserve.hosts import LocalHost
from tests.unit.cases import wait_for

SETPRIV = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


class Engine:
    """A Docker engine's socket that gives one answer to everybody; without an answer it hangs up at once."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self.path = path
        self._answer = answer
        self.asked: list[bytes] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(65536).partition(b"\r\n")[0])
                connection.sendall(self._answer)

    def close(self) -> None:
        """Leave the file behind, as an engine that crashed does."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(5)


def response(status: str, body: bytes) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "docker.sock"


def ask(address: str, monkeypatch: pytest.MonkeyPatch, host: LocalHost | None = None) -> object:
    monkeypatch.setenv("DOCKER_HOST", address)
    session = NodeSession(host or LocalHost("head"))
    try:
        return session.ask("facts", docker=["/info"], timeout=60)["docker"]["/info"]
    finally:
        session.close()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (response("200 OK", b'{"ServerVersion": "28"}'), {"status": 200, "body": {"ServerVersion": "28"}}),
        (response("500 Internal Server Error", b'{"message": "x"}'), {"status": 500, "body": {"message": "x"}}),
        (response("204 No Content", b""), {"status": 204, "body": None}),
        (response("200 OK", b"no JSON"), {"error": "failed"}),
        (b"this is no HTTP\r\n\r\n", {"error": "failed"}),
        (b"", {"error": "failed"}),
    ],
)
def test_answers(place: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes, expected: object) -> None:
    engine = Engine(place, answer)
    assert ask(f"unix://{place}", monkeypatch) == expected
    engine.close()


def test_the_guard_kills_its_container_by_itself_when_memory_is_short(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(place, response("204 No Content", b""))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{place}")
    session = NodeSession(LocalHost("head"))
    try:
        for _ in range(2):
            assert session.ask("guard", container="well", floor=1) == {"killed_at": None}
        assert session.ask("guard", container="hungry", floor=1 << 60) == {"killed_at": None}
        wait_for(lambda: bool(engine.asked), "the container was killed")
        assert engine.asked == [b"POST /containers/hungry/kill HTTP/1.1"]
        assert session.ask("guard", container="well", floor=1) == {"killed_at": None}
        killed_at = session.ask("guard", container="hungry", floor=1)["killed_at"]
        total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
        assert 0 < killed_at <= int(total.split()[1]) * 1024
    finally:
        session.close()
        engine.close()


def test_a_guard_goes_on_until_docker_obeys(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(place, response("500 Internal Server Error", b'{"message": "busy"}'))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{place}")
    session = NodeSession(LocalHost("head"))
    try:
        session.ask("guard", container="hungry", floor=1 << 60)
        wait_for(lambda: len(engine.asked) >= 2, "it was tried again")
    finally:
        session.close()
        engine.close()


def reading_threads(pid: str) -> int:
    """Count the threads of a process that stand back, and run or would if there were a core for them."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return sum((fields[0], fields[16]) == ("R", "19") for fields in stats)


@pytest.mark.parametrize(("containers", "gentle"), [(b'[{"Id": "ours"}]', True), (b"[]", False)])
def test_files_are_read_one_by_one_beside_an_engine_of_ours_whoever_asks(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, containers: bytes, gentle: bool
) -> None:
    engine = Engine(place, response("200 OK", containers))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{place}")
    session = NodeSession(LocalHost("head"))
    paths = [tmp_path / f"{number}.bin" for number in range(4)]
    for path in paths:
        with path.open("wb") as file:
            file.truncate(256 << 20)
    store = str(tmp_path / "proofs.json")
    parts = [[{"path": str(path), "algorithm": "sha256"} for path in paths[half::2]] for half in range(2)]
    seen: list[int] = []
    try:
        pid = session.ask("facts", commands={"pid": ["sh", "-c", "echo $PPID"]})["commands"]["pid"]["out"].strip()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(session.ask, "hash", store=store, files=part) for part in parts]
            while not all(one.done() for one in asked):
                seen.append(reading_threads(pid))
                time.sleep(0.005)
        assert all(row["digest"] for one in asked for row in one.result().values())
        assert b"sparkserve.owner%3Dsparkserve" in engine.asked[0]
        assert (statistics.median(seen) <= 1) == gentle
        # What is asked afterwards is answered at once again.
        niceness = session.ask("facts", commands={"nice": ["nice"]})["commands"]["nice"]["out"]
        assert int(niceness) == os.getpriority(os.PRIO_PROCESS, 0)
    finally:
        session.close()
        engine.close()


def test_no_engine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(f"unix://{place}", monkeypatch) == {"error": "missing"}


def test_an_engine_that_crashed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(place, b"").close()
    assert place.exists()
    assert ask(f"unix://{place}", monkeypatch) == {"error": "refused"}


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user")
def test_an_account_that_may_not(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = Path(tempfile.mkdtemp(dir="/tmp"))  # below pytest's own directories nobody else may look
    directory.chmod(0o755)
    engine = Engine(directory / "docker.sock", response("200 OK", b"{}"))
    engine.path.chmod(0o660)
    wrapper = directory / "python3"
    wrapper.write_text(f'#!/bin/sh\nexec {" ".join(SETPRIV)} /usr/bin/python3 "$@"\n')
    wrapper.chmod(0o755)
    host = LocalHost("head")
    host.python = str(wrapper)
    try:
        assert ask(f"unix://{engine.path}", monkeypatch, host) == {"error": "permission"}
    finally:
        engine.close()
        shutil.rmtree(directory)
