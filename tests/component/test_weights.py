"""Weights on both nodes: planned from facts, brought there, and proved by content."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sparkserve import weights
from sparkserve.cluster import ROLES, Node, Role
from sparkserve.errors import SparkserveError
from sparkserve.hosts import LocalHost
from sparkserve.hub_file import Hub as HubClient
from sparkserve.inventory import PARTIALS, list_items
from sparkserve.partial import Partial
from sparkserve.plan import ApplyReport
from tests.component.weights_stage import KIB, QUICK, SEGMENT, Pair, Recorder, body_bytes
from tests.lab.hub import Hub
from tests.lab.model_repo import make_bench_repo
from tests.lab.repo_store import ModelRepo

SIZES = [3 << 20, 700 * KIB, 300 * KIB, 5]
LARGE, SMALL = "file-00001.bin", "config.json"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> ModelRepo:
    made = make_bench_repo(tmp_path_factory.mktemp("repos"), SIZES)
    made.change(SMALL, b'{"hidden_size": 4096}', branch="main")
    return made


def summary(stage: Pair) -> list[tuple[str, str, str, str]]:
    return [(change.node, change.step, change.resource, change.before) for change in stage.changes()]


def succeed(stage: Pair) -> ApplyReport:
    """Carry out the plan; afterwards both nodes are whole and nothing is left to do."""
    report = stage.apply()
    report.raise_failures()
    assert report.not_reached == []
    stage.assert_whole()
    assert stage.changes() == []
    return report


def put_back_times(path: Path, before: os.stat_result) -> None:
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# -- the line ---------------------------------------------------------------------------------------------------------


def test_everything_missing_is_planned_largest_first_and_joined_by_needs(stage: Pair, hub: Hub) -> None:
    changes = stage.changes()
    head = [change for change in changes if change.node == "head"]
    worker = [change for change in changes if change.node == "worker"]
    assert [change.size for change in head] == sorted((change.size for change in head), reverse=True)
    assert {(change.step, change.lane, change.before) for change in head} == {("download", "download", "missing")}
    assert {(change.step, change.lane, change.before) for change in worker} == {("sync", "copy", "missing")}
    assert [change.needs for change in worker] == [(change.key,) for change in head]
    assert all(change.after.startswith(("sha256:", "git-sha1:")) for change in changes)
    assert hub.log() == []


def test_download_and_sync_end_proved_on_both_nodes(stage: Pair) -> None:
    report = succeed(stage)
    assert len(report.applied) == 2 * (len(SIZES) + 1)
    assert all("sha" in applied.proof for applied in report.applied)
    for role in ROLES:
        assert list((stage.path(role, PARTIALS)).iterdir()) == []
        weights.tidy(stage.node(role), stage.deployment.lock)
        assert not stage.path(role, PARTIALS).exists()


def test_a_journal_that_a_kill_left_goes_and_one_with_its_partial_stays(stage: Pair) -> None:
    succeed(stage)
    place = stage.path("head", PARTIALS)
    place.mkdir(exist_ok=True)
    for name in ("left.journal", "begun", "begun.journal", "left.journal.new"):
        (place / name).touch()
    weights.tidy(stage.node("head"), stage.deployment.lock)
    assert sorted(path.name for path in place.iterdir()) == ["begun", "begun.journal"]
    (place / "begun").unlink()
    weights.tidy(stage.node("head"), stage.deployment.lock)
    assert not place.exists()


def test_a_file_goes_to_the_worker_while_others_still_come(stage: Pair, hub: Hub) -> None:
    hub.control(rate=4_000_000)
    report = succeed(stage)
    last_download = max(item.ended for item in report.applied if item.change.step == "download")
    assert min(item.ended for item in report.applied if item.change.step == "sync") < last_download


def test_what_is_proved_is_not_read_again(stage: Pair) -> None:
    succeed(stage)
    assert stage.verify() == weights.Verification((), len(SIZES) + 1, 0)
    full = stage.verify(full=True)
    assert (full.findings, full.hashed) == ((), 2 * stage.manifest.total_bytes)


def test_a_full_look_believes_no_remembered_hash_and_fetches_nothing_for_one(stage: Pair, hub: Hub) -> None:
    succeed(stage)
    store = Path(stage.node("worker").proofs_file)
    rows = json.loads(store.read_text())
    rows[str(stage.path("worker", LARGE))]["digest"] = "0" * 64
    store.write_text(json.dumps(rows))
    assert [finding.problem for finding in stage.verify().findings] == ["wrong content"]
    assert stage.verify(full=True) == weights.Verification((), len(SIZES) + 1, 2 * stage.manifest.total_bytes)
    assert stage.changes() == []


def test_right_files_of_unknown_hash_are_proved_in_place(stage: Pair, hub: Hub) -> None:
    stage.fill("head", "worker")
    assert {(row[0], row[3]) for row in summary(stage)} == {("head", "not proved"), ("worker", "not proved")}
    inodes = {role: stage.path(role, LARGE).stat().st_ino for role in ROLES}
    succeed(stage)
    assert {role: stage.path(role, LARGE).stat().st_ino for role in ROLES} == inodes
    assert hub.log() == []


@pytest.mark.parametrize("proved", [True, False])
def test_the_head_fetches_from_the_worker_what_lies_there(stage: Pair, hub: Hub, proved: bool) -> None:
    stage.fill("worker")
    if proved:
        stage.verify()
    lanes = {("head", "copy")} if proved else {("head", "copy"), ("worker", "hash")}
    assert {(change.node, change.lane) for change in stage.changes()} == lanes
    succeed(stage)
    assert hub.log() == []


@pytest.mark.parametrize("serves", [True, False])
def test_a_download_stands_back_beside_a_serving_pair(
    stage: Pair, monkeypatch: pytest.MonkeyPatch, serves: bool
) -> None:
    session, write = stage.node("head").session, Partial.write
    ask, seen = session.ask, set()

    def watched(partial: Partial, position: int, data: memoryview) -> None:
        seen.add(os.getpriority(os.PRIO_PROCESS, 0))  # of this thread
        write(partial, position, data)

    monkeypatch.setattr(Partial, "write", watched)
    monkeypatch.setattr(session, "ask", lambda do, **fields: serves if do == "serves" else ask(do, **fields))
    succeed(stage)
    assert seen == {19 if serves else os.getpriority(os.PRIO_PROCESS, 0)}


def test_a_file_of_the_worker_that_rots_meanwhile_comes_from_the_hub(stage: Pair, hub: Hub) -> None:
    stage.fill("worker")
    stage.verify()
    changes = [change for change in stage.changes() if change.resource == f"model/{LARGE}"]
    with stage.path("worker", LARGE).open("r+b") as file:
        file.write(b"rot")
    work = Recorder()
    assert "from the hub" in changes[0].action(work)
    assert any("not from the worker" in note for note in work.notes)
    assert stage.path("head", LARGE).read_bytes() == stage.repo.source(LARGE).read_bytes()
    assert any(entry["host"] == "content" for entry in hub.log())


@pytest.mark.parametrize("proved", [True, False])
def test_a_download_under_way_is_thrown_away_only_for_what_is_proved_on_the_worker(
    stage: Pair, hub: Hub, monkeypatch: pytest.MonkeyPatch, proved: bool
) -> None:
    stage.fill("worker")
    if proved:
        stage.verify()
    else:
        with stage.path("worker", LARGE).open("r+b") as file:
            file.write(b"rot")
    (item,) = [item for item in list_items(stage.deployment.lock) if item.file.path == LARGE]
    path, arrived = Path(item.partial_path(stage.node("head"))), 2 << 20
    with Partial(path, item.file, SEGMENT) as under_way:
        under_way.write(0, memoryview(stage.repo.source(LARGE).read_bytes()[:arrived]))
    monkeypatch.setattr(weights, "Hub", partial(HubClient, limits=QUICK))
    changes = [change for change in stage.changes() if change.resource == f"model/{LARGE}"]
    assert changes[0].lane == ("copy" if proved else "download")
    assert changes[0].action(Recorder()).endswith("from the worker" if proved else "from the hub")
    assert body_bytes(hub) <= (0 if proved else SIZES[0] - arrived)
    assert stage.path("head", LARGE).read_bytes() == stage.repo.source(LARGE).read_bytes()


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_a_flipped_byte_is_seen_and_healed_also_with_its_time_put_back(stage: Pair, role: Role) -> None:
    succeed(stage)
    path = stage.path(role, LARGE)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))
    put_back_times(path, before)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    (row,) = summary(stage)
    assert row == (role, "download" if role == "head" else "sync", f"model/{LARGE}", "not proved")
    (finding,) = stage.verify().findings
    assert (finding.node, finding.problem) == (role, "wrong content")
    assert finding.path.endswith(LARGE)
    succeed(stage)


@pytest.mark.parametrize("role", ROLES)
def test_truncated_missing_linked_and_replaced_files(stage: Pair, role: Role, tmp_path: Path) -> None:
    succeed(stage)
    other = tmp_path / "other"
    other.write_bytes(stage.repo.source(LARGE).read_bytes())
    stage.path(role, LARGE).unlink()
    stage.path(role, LARGE).symlink_to(other)
    os.truncate(stage.path(role, "file-00002.bin"), 1000)
    stage.path(role, SMALL).unlink()
    with stage.path(role, "file-00003.bin").open("ab") as file:
        file.write(b"more")
    before = {row[2].removeprefix("model/"): row[3] for row in summary(stage)}
    expected = {LARGE: "link", "file-00002.bin": "short", SMALL: "missing", "file-00003.bin": "long"}
    assert before == expected
    found = {Path(row.path).name: row.problem for row in stage.verify().findings}
    assert found == expected
    other.write_bytes(b"must stay")
    succeed(stage)
    assert other.read_bytes() == b"must stay"


def test_a_directory_in_place_of_a_file_is_an_error_that_names_it(stage: Pair) -> None:
    succeed(stage)
    stage.path("worker", SMALL).unlink()
    stage.path("worker", SMALL).mkdir()
    with pytest.raises(SparkserveError, match=SMALL):
        stage.apply().raise_failures()
    assert stage.path("worker", SMALL).is_dir()


def test_extra_files_are_told_and_left_alone(stage: Pair) -> None:
    extra = stage.path("worker", "sub/notes with ünïcode.txt")
    extra.parent.mkdir(parents=True)
    extra.write_bytes(b"mine")
    succeed(stage)
    found = stage.verify()
    assert [(row.node, row.problem) for row in found.findings] == [("worker", "extra")]
    assert found.holds
    assert extra.read_bytes() == b"mine"


@pytest.mark.parametrize("answer", [None, {"code": 1, "out": "", "err": "find: …: Permission denied"}])
def test_extra_files_that_cannot_be_listed_are_not_none(
    stage: Pair, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | None
) -> None:
    succeed(stage)
    session = stage.node("worker").session
    ask = session.ask

    def blind(do: str, **fields: Any) -> Any:
        found = ask(do, **fields)
        return {**found, "commands": dict.fromkeys(fields["commands"], answer)} if "commands" in fields else found

    monkeypatch.setattr(session, "ask", blind)
    with pytest.raises(SparkserveError, match="our directories") as caught:
        stage.verify()
    assert (caught.value.code, caught.value.exit_code) == ("disk_look", 6)


def test_a_wrong_file_of_the_hub_stops_what_needs_it_only(stage: Pair, hub: Hub) -> None:
    hub.fault("wrong_byte", match={"host": "content", "path_regex": LARGE}, offset=7)
    report = stage.apply()
    assert [(change.resource, error.code) for change, error in report.failed] == [(f"model/{LARGE}", "wrong_content")]
    assert [change.key for change in report.not_reached] == [f"worker/sync/model/{LARGE}"]
    assert len(report.applied) == 2 * len(SIZES)
    assert not stage.path("head", LARGE).exists()


def test_bytes_missing_counts_what_is_under_way(stage: Pair) -> None:
    lock, total = stage.deployment.lock, stage.manifest.total_bytes
    assert weights.bytes_missing(lock, stage.facts()["head"]) == total
    (item,) = [item for item in list_items(lock) if item.file.path == LARGE]
    partial = Path(item.partial_path(stage.node("worker")))
    partial.parent.mkdir(parents=True)
    with partial.open("wb") as file:
        file.write(stage.repo.source(LARGE).read_bytes()[: 1 << 20])
        file.truncate(SIZES[0])  # a hole is not there yet
    facts = stage.facts()["worker"]
    assert weights.bytes_missing(lock, facts) == total - (1 << 20)
    assert "missing, 33 % under way" in [row[3] for row in summary(stage)]
    succeed(stage)
    assert weights.bytes_missing(lock, stage.facts()["worker"]) == 0


# -- files of others --------------------------------------------------------------------------------------------------


def adopt(stage: Pair, folder: Path) -> None:
    """Let the head use files of a folder in place."""
    folder.mkdir()
    places = {}
    for file in stage.manifest.files:
        (folder / file.path).write_bytes(stage.repo.source(file.path).read_bytes())
        places[f"{stage.manifest.directory}/{file.path}"] = str(folder / file.path)
    note = Path(stage.node("head").models_dir) / ".sparkserve" / "adopted.json"
    note.parent.mkdir(parents=True)
    note.write_text(json.dumps(places))


def test_adopted_files_are_proved_in_place_and_copied_from_there(stage: Pair, hub: Hub, tmp_path: Path) -> None:
    adopt(stage, tmp_path / "theirs")
    stage.apply().raise_failures()
    assert stage.changes() == []
    assert not stage.path("head", LARGE).parent.exists()
    assert stage.path("worker", LARGE).read_bytes() == stage.repo.source(LARGE).read_bytes()
    assert hub.log() == []


def test_an_adopted_file_that_changed_is_never_written_to(stage: Pair, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    adopt(stage, theirs)
    stage.apply().raise_failures()
    (theirs / LARGE).write_bytes(b"changed under us")
    assert summary(stage) == [("head", "download", f"model/{LARGE}", f"short (adopted: {theirs / LARGE})")]
    stage.apply().raise_failures()
    assert stage.changes() == []
    assert (theirs / LARGE).read_bytes() == b"changed under us"
    assert stage.path("head", LARGE).read_bytes() == stage.repo.source(LARGE).read_bytes()
    fresh = Node("head", LocalHost("head"), stage.deployment.settings)
    name = f"{stage.manifest.directory}/{LARGE}"
    assert (name in fresh.adopted, len(fresh.adopted)) == (False, len(SIZES))
    fresh.close()
