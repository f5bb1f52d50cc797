"""Beside a serving engine a node reads one file at a time, whoever asks and whenever the engine began."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkserve import node_program
from sparkserve.cluster import NodeSession
from sparkserve.errors import SparkserveError
from sparkserve.hosts import LocalHost
from tests.unit.cases import wait_for
from tests.unit.test_node_docker import Engine, response

CONTENT = b"weights " * 4096


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """A Docker engine that says that a container of ours runs."""
    running = Engine(tmp_path / "docker.sock", response("200 OK", b'[{"Id": "rank"}]'))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{running.path}")
    yield running
    running.close()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("store", [".sparkserve/proofs.json", "/proc/sparkserve/.sparkserve/proofs.json"])
def test_beside_an_engine_all_programs_read_one_file_at_a_time_and_a_killed_one_frees_its_turn(
    tmp_path: Path, store: str
) -> None:
    endless, small = tmp_path / "endless", tmp_path / "small"
    with endless.open("wb") as file:
        file.truncate(1 << 40)
    small.write_bytes(CONTENT)
    told: dict[Path, list[int]] = {endless: [], small: []}
    sessions = [NodeSession(LocalHost("head")) for _ in told]

    def read(session: NodeSession, path: Path) -> Any:
        rows = [{"path": str(path), "algorithm": "sha256", "size": 1}]
        tell = told[path].append
        return session.ask(
            "hash", store=str(tmp_path / store), files=rows, on_progress=lambda progress: tell(progress["bytes"])
        )

    with concurrent.futures.ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as ending:
        for session in sessions:
            ending.callback(session.close)
        first = pool.submit(read, sessions[0], endless)
        wait_for(lambda: bool(told[endless]), "the first reads")
        second = pool.submit(read, sessions[1], small)
        wait_for(lambda: len(told[small]) > 2 or second.done(), "the second waits")
        assert not second.done()
        assert set(told[small]) == {0}
        sessions[0].close()
        with pytest.raises(SparkserveError):
            first.result(30)
        assert second.result(30)[str(small)]["digest"] == hashlib.sha256(CONTENT).hexdigest()


def test_a_start_in_the_middle_of_a_request_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"f{number}" for number in range(12)]
    for path in paths:
        path.write_bytes(CONTENT)
    serving, counting = threading.Event(), threading.Lock()
    reading: set[str] = set()
    beside: list[int] = []

    def hash_file(path: str, _algorithm: str, _tell: object) -> tuple[os.stat_result, str]:
        gently = serving.is_set()
        with counting:
            reading.add(path)
        time.sleep(0.02)
        with counting:
            if gently:
                beside.append(len(reading))
            reading.remove(path)
        if path == str(paths[0]):
            serving.set()
        return Path(path).stat(), "digest"

    monkeypatch.setattr(node_program, "hash_file", hash_file)
    monkeypatch.setattr(node_program, "serves", serving.is_set)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    rows = [{"path": str(path), "algorithm": "sha256", "size": 1} for path in paths]
    request = {"store": str(tmp_path / "proofs.json"), "files": rows}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # whose thread becomes nice, and not this one
        found = pool.submit(node_program.hash_files, request, lambda _: None).result(60)
    assert {row["digest"] for row in found.values()} == {"digest"}
    assert beside[-4:] == [1, 1, 1, 1]  # those that were begun before end as they began
