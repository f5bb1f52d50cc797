"""Downloads that were killed, went stale or met a full disk: what is kept, and what is never believed."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparkserve.manifest import ManifestFile
from sparkserve.partial import Journal, Partial, boot_id
from tests.component.weights_stage import (
    FILE,
    KIB,
    QUICK,
    SEGMENT,
    body_bytes,
    client,
    fetch,
    refused,
    wait_until,
    wanted,
)
from tests.lab.hub import Hub
from tests.lab.model_repo import make_bench_repo
from tests.lab.repo_store import ModelRepo
from tests.unit.test_node_program import NEEDS_FINCORE, cached_bytes

SIZE = 20 * SEGMENT + 777


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> ModelRepo:
    return make_bench_repo(tmp_path_factory.mktemp("repos"), [SIZE])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hidden" / "partial"


_CHILD = """
import sys
from pathlib import Path
from sparkserve.download import download
from tests.component.weights_stage import QUICK, Recorder, wanted
from sparkserve.hub_file import Hub
from sparkserve.settings import Settings
from tests.lab.repo_store import ModelRepo
repo = ModelRepo(Path(sys.argv[2]), sys.argv[3])
print("ready", flush=True)
download(Hub(Settings(hf_endpoint=sys.argv[1]), QUICK), wanted(repo, sys.argv[4]), Path(sys.argv[5]), Recorder())
"""


def _run_and_kill(hub: Hub, repo: ModelRepo, path: Path, enough: int) -> None:
    """Download in a process of its own, and kill that one hard once `enough` bytes were served."""
    argv = [sys.executable, "-c", _CHILD, hub.endpoint, str(repo.root), repo.name, FILE, str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as child:
        try:
            wait_until(lambda: sum(entry["bytes_sent"] for entry in hub.state.log.entries()) >= enough)
        finally:
            child.send_signal(signal.SIGKILL)


def test_killed_at_random_points_it_fetches_only_what_was_in_flight_again(
    hub: Hub, repo: ModelRepo, path: Path
) -> None:
    hub.control(rate=3_000_000)
    places = random.Random(7)
    for _ in range(3):
        served = body_bytes(hub)
        _run_and_kill(hub, repo, path, served + places.randrange(SIZE // 8, SIZE // 4))
    hub.control(rate=None)
    fetch(client(hub), repo, path)
    # Besides whole segments in flight, what the kernel had buffered on its way counts as served.
    in_flight = QUICK.connections * SEGMENT
    assert SIZE <= body_bytes(hub) <= SIZE + 3 * (in_flight + 4 * 256 * KIB)
    assert body_bytes(hub) < 3 * SIZE


def test_a_resumed_file_is_hashed_from_its_start(hub: Hub, repo: ModelRepo, path: Path) -> None:
    fetch(client(hub), repo, path)
    with path.open("r+b") as file:
        file.seek(SEGMENT)
        file.write(b"rotten")
    before = body_bytes(hub)
    fetch(client(hub), repo, path)
    assert body_bytes(hub) - before == SIZE


def test_a_finished_partial_is_proved_without_a_request(hub: Hub, repo: ModelRepo, path: Path) -> None:
    fetch(client(hub), repo, path)
    hub.reset()
    fetch(client(hub), repo, path)
    assert hub.log() == []


@pytest.mark.parametrize("stale", [b"", b"garbage\n\0\0\n", b"12 abc 64\nboot\nsegment 1\n"])
def test_a_stale_journal_is_not_believed(hub: Hub, repo: ModelRepo, path: Path, stale: bytes) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\1" * 100)
    path.with_name(path.name + ".journal").write_bytes(stale)
    work = fetch(client(hub), repo, path)
    assert not any("wrong content" in note for note in work.notes)


def test_a_link_in_place_of_the_partial_is_not_written_through(hub: Hub, repo: ModelRepo, path: Path) -> None:
    other = path.parent.parent / "other"
    other.write_bytes(b"someone else's")
    path.parent.mkdir()
    path.symlink_to(other)
    fetch(client(hub), repo, path)
    assert other.read_bytes() == b"someone else's"
    assert not path.is_symlink()


def test_journal_of_this_boot_and_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = Journal(path, "head")
    for number in (4, 1, 7):
        journal.add(number)
    journal.note_durable(2)
    journal.close()
    text = path.read_text()
    assert _segments(path, "head") == [4, 1, 7]
    path.write_text(text + "segment 1")  # cut in the middle of `segment 12`
    assert _segments(path, "head") == [4, 1, 7]
    path.write_text(text.replace(boot_id(), "another-boot"))
    assert _segments(path, "head") == [4, 1]
    assert _segments(path, "another head") == []


def _segments(path: Path, header: str) -> list[int]:
    journal = Journal(path, header)
    journal.close()
    return journal.segments


def test_a_full_disk_names_the_place_and_keeps_what_came(
    hub: Hub, repo: ModelRepo, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    written = [0]

    def pwrite(descriptor: int, data: Any, position: int) -> int:
        written[0] += len(data)
        if written[0] > SIZE // 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", pwrite)
    error = refused(client(hub), repo, path)
    assert (error.code, str(path.parent) in error.message) == ("disk_full", True)
    monkeypatch.undo()
    before = body_bytes(hub)
    fetch(client(hub), repo, path)
    assert body_bytes(hub) - before < SIZE


def test_a_disk_that_fails_behind_the_hash_is_told_at_once(
    repo: ModelRepo, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fdatasync(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("sparkserve.partial._DROP_BYTES", SEGMENT)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    content = memoryview(repo.source(FILE).read_bytes())
    with Partial(path, wanted(repo, FILE).file, SEGMENT) as partial:
        partial.write(0, content[:SEGMENT])
        wait_until(lambda: not partial._follower.is_alive())
        with pytest.raises(OSError, match="Input/output error"):
            partial.write(SEGMENT, content[SEGMENT : 2 * SEGMENT])


@NEEDS_FINCORE
def test_a_partial_leaves_no_pages_behind_its_hash(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkserve.partial._DROP_BYTES", 4 << 20)
    file = ManifestFile(path="large", size=32 << 20, sha256="0" * 64)
    with Partial(path, file, 1 << 20) as partial:
        partial.write(0, memoryview(os.urandom(31 << 20)))  # the last segment does not come
        wait_until(lambda: cached_bytes(path) < 8 << 20, 15)


def test_the_hash_follows_out_of_order_segments(repo: ModelRepo, path: Path) -> None:
    content = repo.source(FILE).read_bytes()
    with Partial(path, wanted(repo, FILE).file, SEGMENT) as partial:
        for number in sorted(partial.missing(), key=lambda number: (number % 3, -number)):
            position = number * SEGMENT
            partial.write(position, memoryview(content[position : position + SEGMENT]))
        assert partial.digest(lambda _done: None) == wanted(repo, FILE).file.digest
