from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkserve.cluster import NodeSession
from sparkserve.hosts import LocalHost
from tests.unit.sshd import Client, Sshd, make_client, running_sshd


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("ssh") / "server") as found:
        yield found


@pytest.fixture
def client(tmp_path: Path, server: Sshd, monkeypatch: pytest.MonkeyPatch) -> Client:
    return make_client(tmp_path, server, monkeypatch)


@pytest.fixture(params=["this python", "the system's python"], scope="module")
def session(request: pytest.FixtureRequest) -> Iterator[NodeSession]:
    host = LocalHost("head")
    if request.param == "the system's python":
        host.python = "/usr/bin/python3"
    found = NodeSession(host)
    yield found
    found.close()
