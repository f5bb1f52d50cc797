from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sparkserve.cluster import NodeSession
from sparkserve.errors import SparkserveError
from sparkserve.hosts import LocalHost
from sparkserve.system import parse_disk
from tests.unit.cases import wait_for

CONTENT = b"weights " * 4096


class Files:
    """Files to hash, and the store that remembers their hashes."""

    def __init__(self, directory: Path, session: NodeSession) -> None:
        self.directory = directory
        self.store = directory / ".sparkserve" / "proofs.json"
        self._session = session

    def make(self, name: str, content: bytes = CONTENT) -> Path:
        path = self.directory / name
        path.write_bytes(content)
        return path

    def ask(self, do: str, *paths: Path, algorithm: str = "sha256", **fields: Any) -> dict[str, Any]:
        rows = [{"path": str(path), "algorithm": algorithm, "size": 1} for path in paths]
        answer: dict[str, Any] = self._session.ask(do, store=str(self.store), files=rows, **fields)
        return answer

    def look(self, path: Path, algorithm: str = "sha256") -> dict[str, Any]:
        row: dict[str, Any] = self.ask("look", path, algorithm=algorithm)[str(path)]
        return row

    def hash(self, path: Path, algorithm: str = "sha256") -> dict[str, Any]:
        row: dict[str, Any] = self.ask("hash", path, algorithm=algorithm)[str(path)]
        return row


@pytest.fixture
def files(tmp_path: Path, session: NodeSession) -> Files:
    return Files(tmp_path, session)


# -- facts ------------------------------------------------------------------------------------------------------------


def test_hello(session: NodeSession) -> None:
    found = session.ask("hello")
    assert (found["uid"], found["hostname"]) == (os.getuid(), socket.gethostname())
    assert found["cpus"] >= 1


def test_files_tools_and_commands(session: NodeSession, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"text \xff\n")
    commands = {
        "good": ["sh", "-c", "echo out; echo err >&2; exit 3"],
        "none": ["sparkserve-no-such-tool"],
        "odd": ["printf", "\\377"],
    }
    asked = [str(tmp_path / "f"), str(tmp_path / "none"), str(tmp_path)]
    found = session.ask("facts", files=asked, tools=["sh", "sparkserve-no-such-tool"], commands=commands)
    assert list(found["files"].values()) == ["text \ufffd\n", None, None]
    assert found["tools"]["sh"].endswith("/sh")
    assert found["tools"]["sparkserve-no-such-tool"] is None
    assert found["commands"] == {
        "good": {"code": 3, "out": "out\n", "err": "err\n"},
        "none": None,
        "odd": {"code": 0, "out": "\ufffd", "err": ""},
    }
    assert abs(found["time"] - time.time()) < 60
    assert found["machine"] == os.uname().machine


def test_a_tool_that_reads_its_input_takes_no_request_away(session: NodeSession) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        reads = pool.submit(session.ask, "facts", commands={"cat": ["cat"]}, timeout=60)
        others = [session.ask("hello", timeout=60) for _ in range(5)]
        assert reads.result()["commands"]["cat"] == {"code": 0, "out": "", "err": ""}
    assert len(others) == 5


def test_globs(session: NodeSession, tmp_path: Path) -> None:
    for name in ("a/x", "b/x"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "a/speed").write_text("200000\n")
    patterns = [f"{tmp_path}/*/speed", f"{tmp_path}/*/x", f"{tmp_path}/none/*"]
    found = session.ask("facts", globs=patterns)["globs"]
    assert found == {
        patterns[0]: {f"{tmp_path}/a/speed": "200000\n"},
        patterns[1]: {f"{tmp_path}/a/x": "", f"{tmp_path}/b/x": ""},
        patterns[2]: {},
    }


def test_whether_something_exists_is_told_without_reading_it(session: NodeSession, tmp_path: Path) -> None:
    (tmp_path / "rank.bin").write_bytes(b"x" * 100_000)
    patterns = [f"{tmp_path}/*.bin", f"{tmp_path}/*.none"]
    found = session.ask("facts", exist=patterns)
    assert found["exist"] == {patterns[0]: True, patterns[1]: False}
    assert len(json.dumps(found)) < 1000


def test_disk_of_a_path_that_will_be_made(session: NodeSession, tmp_path: Path) -> None:
    paths = [str(tmp_path / "not" / "yet" / "there"), str(tmp_path), "/proc"]
    found = session.ask("facts", disks=paths)["disks"]
    future, present, proc = (found[path] for path in paths)
    assert (future["place"], future["device"], future["writable"]) == (str(tmp_path), tmp_path.stat().st_dev, True)
    assert present["total"] == shutil.disk_usage(tmp_path).total
    assert present["free"] > 0
    assert proc["device"] != present["device"]
    assert proc["inodes"] is None


def test_a_file_in_the_place_of_a_directory(session: NodeSession, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(mode=0o755)
    paths = [str(file), str(file / "below" / "it"), str(tmp_path / "absent")]
    found = session.ask("facts", disks=paths)["disks"]
    seen = [parse_disk(path, found[path]).blocked_by for path in paths]
    assert seen == [str(file), str(file), ""]


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_ports(session: NodeSession, address: str) -> None:
    with socket.socket() as server:
        server.bind((address, 0))
        server.listen()
        port = server.getsockname()[1]
        assert session.ask("facts", ports=[port])["ports"] == {str(port): "Address already in use"}
    assert session.ask("facts", ports=[port])["ports"] == {str(port): "free"}


# -- files and hashes -------------------------------------------------------------------------------------------------


def test_kinds(files: Files, tmp_path: Path) -> None:
    target = files.make("file")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    names = ["file", "link", "dangling", "fifo", "none", ".", "file/below"]
    found = files.ask("look", *[tmp_path / name for name in names])
    kinds = {name: found[str(tmp_path / name)]["kind"] for name in names}
    assert list(kinds.values()) == ["file", "link", "link", "other", "missing", "other", "unreadable"]
    hashed = files.ask("hash", *[tmp_path / name for name in names])
    assert [name for name in names if hashed[str(tmp_path / name)]["digest"]] == ["file"]


def test_a_hash_is_right_and_remembered(files: Files) -> None:
    path = files.make("f")
    assert files.look(path)["digest"] is None
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert files.hash(path) == {"kind": "file", "size": len(CONTENT), "digest": digest}
    assert files.look(path)["digest"] == digest
    assert files.look(path, "git-sha1")["digest"] is None


@pytest.mark.parametrize("content", [b"", CONTENT])
def test_the_git_hash_is_that_of_git(files: Files, content: bytes) -> None:
    path = files.make("f", content)
    answer = subprocess.run(["git", "hash-object", str(path)], capture_output=True, text=True, check=True)
    assert files.hash(path, "git-sha1")["digest"] == answer.stdout.strip()


def test_a_flip_of_the_same_size_with_the_time_put_back_is_seen(files: Files) -> None:
    path = files.make("f")
    files.hash(path)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(100)
        file.write(b"\x00")
    # the kernel's clock for files has steps: the change must fall into another one, as it does after any real hash
    wait_for(lambda: touch_back(path, before) != before.st_ctime_ns, "the clock moves on")
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert files.look(path)["digest"] is None
    assert files.hash(path)["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()


def touch_back(path: Path, before: os.stat_result) -> int:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path.stat().st_ctime_ns


def test_a_file_that_is_replaced_is_not_the_remembered_one(files: Files, tmp_path: Path) -> None:
    path = files.make("f")
    files.hash(path)
    files.make("new").replace(path)
    assert files.look(path)["digest"] is None


@pytest.mark.parametrize(
    "store",
    ["", "{", "[]", "5", '{"PATH": 5}', '{"PATH": {}}', '{"PATH": {"is": [1], "by": "sha256"}}', "\x00"],
)
def test_a_store_that_is_broken_is_an_empty_one(files: Files, store: str) -> None:
    path = files.make("f")
    files.store.parent.mkdir()
    files.store.write_text(store.replace("PATH", str(path)))
    assert files.look(path)["digest"] is None
    files.hash(path)
    assert files.look(path)["digest"]
    assert set(json.loads(files.store.read_text())) == {str(path)}


def test_a_store_that_cannot_be_written_hides_no_proof(files: Files) -> None:
    path = files.make("f")
    files.store.parent.write_text("a file is in the way")
    assert files.hash(path)["digest"] == hashlib.sha256(CONTENT).hexdigest()


def test_many_files_side_by_side_are_all_remembered(files: Files) -> None:
    paths = [files.make(f"f{n}", bytes([n]) * 1000) for n in range(12)]
    found = files.ask("hash", *paths)
    assert [found[str(path)]["digest"] for path in paths] == [
        hashlib.sha256(bytes([n]) * 1000).hexdigest() for n in range(12)
    ]
    again = files.ask("look", *paths)
    assert all(row["digest"] for row in again.values())


def test_progress_of_a_long_hash(files: Files, session: NodeSession) -> None:
    path = files.directory / "large"
    with path.open("wb") as file:
        file.truncate(300_000_000)
    told: list[int] = []
    files.ask("hash", path, on_progress=lambda progress: told.append(progress["bytes"]))
    assert told == sorted(told)
    assert 0 < told[0] <= 300_000_000


def test_a_file_that_changes_while_it_is_hashed_has_no_hash(files: Files) -> None:
    path = files.directory / "large"
    with path.open("wb") as file:
        file.truncate(400_000_000)
    begun = threading.Event()
    stop = threading.Event()

    def change() -> None:
        begun.wait(60)
        while not stop.is_set():
            os.utime(path)

    changer = threading.Thread(target=change)
    changer.start()
    row = files.ask("hash", path, on_progress=lambda _: begun.set())[str(path)]
    stop.set()
    changer.join()
    assert (row["kind"], row["digest"], row["error"]) == ("unreadable", None, "changed while it was read")
    assert files.look(path)["digest"] is None


NEEDS_FINCORE = pytest.mark.skipif(shutil.which("fincore") is None, reason="fincore of util-linux is not there")


@NEEDS_FINCORE
def test_hashing_leaves_no_pages_behind(files: Files) -> None:
    path = files.make("f", os.urandom(32 << 20))
    write_out(path)
    assert cached_bytes(path) > 16 << 20
    files.hash(path)
    assert cached_bytes(path) < 4 << 20


def write_out(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def cached_bytes(path: Path) -> int:
    argv = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


def test_settle(files: Files, session: NodeSession, tmp_path: Path) -> None:
    source, target = files.make("part"), tmp_path / "deep" / "er" / "f"
    journal = files.make("part.journal")
    fields: dict[str, Any] = {"store": str(files.store), "algorithm": "sha256", "digest": "d" * 64}
    fields["journal"] = str(journal)
    found = session.ask("settle", source=str(source), target=str(target), **fields)
    assert (found, target.read_bytes()) == ({"size": len(CONTENT)}, CONTENT)
    assert not any(path.exists() for path in (source, journal))
    assert files.look(target)["digest"] == "d" * 64


def test_what_we_made_stays_ours_when_it_is_read_again(files: Files, session: NodeSession, tmp_path: Path) -> None:
    target = tmp_path / "f"
    fields: dict[str, Any] = {"store": str(files.store), "algorithm": "sha256", "digest": "d" * 64, "journal": "/none"}
    session.ask("settle", source=str(files.make("part")), target=str(target), **fields)
    theirs = files.make("theirs")
    files.ask("hash", target, theirs)
    store = json.loads(files.store.read_text())
    assert {path: row.get("own") for path, row in store.items()} == {str(target): True, str(theirs): None}
    assert store[str(target)]["digest"] == hashlib.sha256(CONTENT).hexdigest()


def test_two_programs_that_remember_at_once_lose_nothing(files: Files) -> None:
    paths = [files.make(f"f{number}") for number in range(40)]
    sessions = [NodeSession(LocalHost("head")) for _ in range(2)]
    rows = [[{"path": str(path), "algorithm": "sha256", "size": 1} for path in paths[half::2]] for half in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one, part: one.ask("hash", store=str(files.store), files=part), sessions, rows))
    for one in sessions:
        one.close()
    assert set(json.loads(files.store.read_text())) == {str(path) for path in paths}


def test_settle_replaces_a_link_and_not_what_it_points_to(files: Files, session: NodeSession, tmp_path: Path) -> None:
    other, target = files.make("other", b"other"), tmp_path / "f"
    target.symlink_to(other)
    session.ask("settle", source=str(files.make("part")), target=str(target), journal="/none")
    assert (target.is_symlink(), target.read_bytes(), other.read_bytes()) == (False, CONTENT, b"other")


def test_mkdir_and_remove(session: NodeSession, tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    for _ in range(2):
        session.ask("mkdir", paths=[str(directory)], mode=0o700)
    (directory / "f").touch()
    assert directory.stat().st_mode & 0o777 == 0o700
    session.ask("remove", paths=[str(directory / "f"), str(directory / "none")])
    assert list(directory.iterdir()) == []


def test_failures_name_the_path(session: NodeSession, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(SparkserveError) as caught:
        session.ask("mkdir", paths=[str(tmp_path / "f" / "below")])
    assert (caught.value.node, str(tmp_path) in caught.value.message) == ("head", True)
    with pytest.raises(SparkserveError, match="no-such-thing") as caught:
        session.ask("no-such-thing")
    assert caught.value.code == "node_failed"


def test_requests_side_by_side_get_their_own_answers(session: NodeSession, tmp_path: Path) -> None:
    def ask(n: int) -> str:
        path = tmp_path / str(n)
        path.write_text(str(n))
        text: str = session.ask("facts", files=[str(path)])["files"][str(path)]
        return text

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(64))) == [str(n) for n in range(64)]
