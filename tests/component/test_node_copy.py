"""The copy of one file between nodes: resumed, cut, refused, stalled, and proved where it arrives."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sparkserve import copy_program, node_copy
from sparkserve.cluster import Node, Role
from sparkserve.errors import SparkserveError
from sparkserve.hosts import Host, LocalHost, Process
from sparkserve.inventory import list_items
from sparkserve.manifest import ManifestFile
from sparkserve.node_copy import Copy, CopyLimits, copy
from sparkserve.plan import Cancelled
from tests.component.weights_stage import KIB, Pair, Recorder, pair, wait_until
from tests.lab.hub import Hub
from tests.lab.model_repo import make_bench_repo
from tests.lab.repo_store import ModelRepo
from tests.unit.test_node_program import NEEDS_FINCORE, cached_bytes, write_out

SIZES = [3 << 20, 700 * KIB]
LARGE = "file-00001.bin"
QUICK = CopyLimits(stall_seconds=20, tries=2, first_wait=0.05, longest_wait=0.1)


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> ModelRepo:
    return make_bench_repo(tmp_path_factory.mktemp("repos"), SIZES)


class Scripted(LocalHost):
    """A machine whose way for bulk data is a shell line; `$@` is what should have run."""

    def __init__(self, line: str) -> None:
        super().__init__("worker")
        self.line = line

    def bulk_argv(self, argv: Sequence[str], link_address: str, login: str = "") -> list[str]:
        return ["bash", "-c", self.line, "bash", *argv]


class Far(Host):
    """This machine, but not known as such: the sending end has to be a program there."""

    def open(self, argv: Sequence[str]) -> Process:
        return LocalHost(self.name).open(argv)

    def close(self) -> None:
        return


def job_of(stage: Pair, source: Role = "head", target: Role = "worker") -> Copy:
    (item,) = [item for item in list_items(stage.deployment.lock) if item.file.path == LARGE]
    there = stage.node(target)
    return Copy(stage.node(source), str(stage.path(source, LARGE)), there, item.partial_path(there), item.file, QUICK)


def test_a_copy_goes_on_from_what_is_there(stage: Pair) -> None:
    stage.fill("head")
    job = job_of(stage)
    content = stage.repo.source(LARGE).read_bytes()
    partial = Path(job.partial)
    partial.parent.mkdir(parents=True)
    partial.write_bytes(content[: 2 << 20])
    with stage.path("head", LARGE).open("r+b") as file:
        file.write(b"what is not sent again is not looked at here")
    copy(job, Recorder())
    assert partial.read_bytes() == content


@pytest.mark.parametrize("stale", [b"rotten prefix", b"longer than the file" * (1 << 18)])
def test_a_stale_partial_is_noticed_and_copied_from_the_start(stage: Pair, stale: bytes) -> None:
    stage.fill("head")
    job = job_of(stage)
    Path(job.partial).parent.mkdir(parents=True)
    Path(job.partial).write_bytes(stale)
    copy(job, Recorder())
    assert Path(job.partial).read_bytes() == stage.repo.source(LARGE).read_bytes()


def test_a_source_that_is_wrong_is_told_and_leaves_nothing(stage: Pair) -> None:
    stage.fill("head")
    with stage.path("head", LARGE).open("r+b") as file:
        file.write(b"rot")
    job = job_of(stage)
    with pytest.raises(SparkserveError, match=LARGE) as caught:
        copy(job, Recorder())
    assert (caught.value.code, caught.value.node) == ("wrong_content", "worker")
    assert not Path(job.partial).exists()


def test_a_partial_with_holes_is_not_taken_for_a_prefix(stage: Pair) -> None:
    stage.fill("worker")
    job = job_of(stage, "worker", "head")
    Path(job.partial).parent.mkdir(parents=True)
    Path(job.partial).write_bytes(b"\0" * SIZES[0])
    Path(job.partial + ".journal").write_text("of the downloader")
    work = Recorder()
    copy(job, work)
    assert work.notes == []
    assert not Path(job.partial + ".journal").exists()


def test_the_receiver_widens_its_pipe(tmp_path: Path) -> None:
    argv = [sys.executable, "-I", copy_program.__file__, str(tmp_path / "file"), "0", "6", "sha256"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdin is not None
        pipe = receiver.stdin.fileno()
        wait_until(lambda: fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) == copy_program.BLOCK)
        out, _ = receiver.communicate(b"weight")
    assert json.loads(out.splitlines()[-1]) == {"digest": hashlib.sha256(b"weight").hexdigest()}


def test_a_source_that_is_far_sends_from_where_the_target_is(repo: ModelRepo, hub: Hub, tmp_path: Path) -> None:
    with pair(repo, hub.endpoint, tmp_path) as stage:
        stage.fill("worker")
        job = job_of(stage, "worker", "head")
        job = replace(job, source=Node("worker", Far("worker"), stage.deployment.settings))
        Path(job.partial).parent.mkdir(parents=True)
        Path(job.partial).write_bytes(repo.source(LARGE).read_bytes()[: 1 << 20])
        copy(job, Recorder())
        assert Path(job.partial).read_bytes() == repo.source(LARGE).read_bytes()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("echo 'ssh: connect to host 10.9.8.7 port 22: No route to host' >&2; exit 255", "No route to host"),
        ("exec sleep 60", "nothing moved for 0.6 s"),
        ('head -c 100000 | "$@"', "connection ended"),
    ],
)
def test_a_link_that_does_not_carry_is_named(repo: ModelRepo, hub: Hub, tmp_path: Path, line: str, words: str) -> None:
    with pair(repo, hub.endpoint, tmp_path, Scripted(line)) as stage:
        stage.fill("head")
        with pytest.raises(SparkserveError) as caught:
            copy(replace(job_of(stage), limits=replace(QUICK, stall_seconds=0.6)), Recorder())
    error = caught.value
    assert (error.code, error.node) == ("copy_failed", "worker")
    assert "10.9.8.7" in error.message
    assert words in error.message
    assert "ssh -o HostName=10.9.8.7" in error.hint


def test_a_receiver_that_hangs_behind_a_dead_cable_is_waited_for(stage: Pair) -> None:
    stage.fill("head")
    job = job_of(stage)
    Path(job.partial).parent.mkdir(parents=True)
    work = Recorder()
    with Path(job.partial).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        copying = threading.Thread(target=copy, args=(job, work))
        copying.start()
        wait_until(lambda: any("an earlier copy still holds" in note for note in work.notes))
    copying.join(60)
    assert Path(job.partial).read_bytes() == stage.repo.source(LARGE).read_bytes()


@NEEDS_FINCORE
def test_a_copy_drops_the_pages_of_its_source_behind_it_and_leaves_none_on_either_end(
    repo: ModelRepo, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_copy, "_DROP_BYTES", 1 << 20)
    real, dropped = os.posix_fadvise, list[int]()

    def watched(descriptor: int, offset: int, length: int, advice: int) -> None:
        dropped.append(length)
        real(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", watched)
    go = tmp_path / "go"
    pause = f"for n in $(seq 24); do head -c 1048576; sleep 0.03; done; until [ -e {go} ]; do sleep 0.02; done; cat"
    content = os.urandom(32 << 20)
    file = ManifestFile(path="large", size=len(content), sha256=hashlib.sha256(content).hexdigest())
    with pair(repo, hub.endpoint, tmp_path, Scripted(f'({pause}) | "$@"')) as stage:
        source, target = tmp_path / "large", tmp_path / "partial"
        source.write_bytes(content)
        write_out(source)
        assert cached_bytes(source) > 24 << 20
        job = Copy(stage.node("head"), str(source), stage.node("worker"), str(target), file, QUICK)
        with ThreadPoolExecutor(1) as pool:
            copying = pool.submit(copy, job, Recorder())
            try:
                wait_until(lambda: any(length >= 1 << 20 for length in dropped), 20)
            finally:
                go.touch()
            copying.result(60)
    assert max(cached_bytes(source), cached_bytes(target)) < 4 << 20
    assert target.read_bytes() == content


@NEEDS_FINCORE
def test_the_receiver_drops_pages_behind_it(tmp_path: Path) -> None:
    target, block = tmp_path / "file", os.urandom(1 << 20)
    line = "import sys; from sparkserve import copy_program as it; it.DROP = 1 << 20; it.main(sys.argv[1:])"
    argv = [sys.executable, "-c", line, str(target), "0", str(1 << 30), "sha256"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as receiver:
        assert receiver.stdin is not None
        pipe, sent = receiver.stdin, 0

        def has_dropped() -> bool:
            nonlocal sent
            assert sent < 96 << 20, "nothing is dropped"
            sent += pipe.write(block)
            return sent > 24 << 20 and cached_bytes(target) < sent // 2

        try:
            wait_until(has_dropped, 15)
        finally:
            pipe.close()


@pytest.mark.parametrize("serves", [True, False])
def test_both_ends_stand_back_beside_a_serving_pair(
    repo: ModelRepo, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    mark = tmp_path / "argv"
    with pair(repo, hub.endpoint, tmp_path, Scripted(f'echo "$@" > {mark}; exec "$@"')) as stage:
        stage.fill("head")
        session = stage.node("worker").session
        real = session.ask
        monkeypatch.setattr(session, "ask", lambda do, **fields: serves if do == "serves" else real(do, **fields))
        copy(job_of(stage), Recorder())
    assert mark.read_text().startswith("nice -n 19 ") == serves


def test_a_cut_is_survived_and_the_shell_of_the_account_may_chatter(repo: ModelRepo, hub: Hub, tmp_path: Path) -> None:
    once = tmp_path / "once"
    line = f'echo "Welcome to DGX OS"; [ -e {once} ] && exec "$@"; touch {once}; head -c 2000000 | "$@"'
    with pair(repo, hub.endpoint, tmp_path, Scripted(line)) as stage:
        stage.fill("head")
        work = Recorder()
        copy(job_of(stage), work)
        assert Path(job_of(stage).partial).read_bytes() == repo.source(LARGE).read_bytes()
    assert [note for note in work.notes if "going on from 1 MiB" in note]


def test_a_refusal_of_ssh_is_not_tried_again(repo: ModelRepo, hub: Hub, tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    line = f"echo x >> {tries}; echo 'me@10.9.8.7: Permission denied (publickey).' >&2; exit 255"
    with pair(repo, hub.endpoint, tmp_path, Scripted(line)) as stage:
        stage.fill("head")
        with pytest.raises(SparkserveError, match="Permission denied"):
            copy(job_of(stage), Recorder())
    assert tries.read_text() == "x\n"


def test_a_full_disk_there_is_told_with_path_and_size(repo: ModelRepo, hub: Hub, tmp_path: Path) -> None:
    # A file system of 1 MiB that only the receiver sees, and that ends with it.
    mount = 'mkdir -p "$0"; mount -t tmpfs -o size=1m none "$0"; exec "$@"'
    host = Scripted("")
    with pair(repo, hub.endpoint, tmp_path, host) as stage:
        stage.fill("head")
        job = job_of(stage)
        host.line = f"exec unshare --mount bash -c '{mount}' {Path(job.partial).parent} \"$@\""
        with pytest.raises(SparkserveError) as caught:
            copy(job, Recorder())
    error = caught.value
    assert (error.code, error.node) == ("disk_full", "worker")
    assert job.partial in error.message
    assert str(SIZES[0]) in error.message


def test_cancelling_a_copy_ends_its_processes(repo: ModelRepo, hub: Hub, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    with pair(repo, hub.endpoint, tmp_path, Scripted(f"echo $$ > {mark}; exec sleep 60")) as stage:
        stage.fill("head")
        work = Recorder()
        work.cancelled.set()
        with pytest.raises(Cancelled):
            copy(replace(job_of(stage), limits=CopyLimits()), work)
    assert not mark.exists() or not Path(f"/proc/{mark.read_text().strip()}").exists()
