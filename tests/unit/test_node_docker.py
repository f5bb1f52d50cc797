from __future__ import annotations

import os
import shutil
import socket
import threading
from pathlib import Path

import pytest

from sparkserve.cluster import NodeSession
from sparkserve.hosts import LocalHost

SETPRIV = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


class Engine:
    """A Docker engine's socket that gives one answer to everybody; without an answer it hangs up at once."""

    def __init__(self, path: Path, answer: bytes) -> None:
        self.path = path
        self._answer = answer
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
                connection.recv(65536)
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
        return session.ask("facts", docker=["/info"], timeout=20)["docker"]["/info"]
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


def test_no_engine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(f"unix://{place}", monkeypatch) == {"error": "missing"}


def test_an_engine_that_crashed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Engine(place, b"").close()
    assert place.exists()
    assert ask(f"unix://{place}", monkeypatch) == {"error": "refused"}


@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user")
def test_an_account_that_may_not(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = Path(f"/tmp/sparkserve-docker-{os.getpid()}")  # below pytest's own directories nobody else may look
    directory.mkdir(mode=0o755)
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
