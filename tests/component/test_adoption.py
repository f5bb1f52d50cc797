"""Weights of others: found wherever they lie, proved, used in place, and never touched."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from sparkserve import adoption, lifecycle, planning, tables, weights
from sparkserve.adoption import Found, choose, parse_folders
from sparkserve.cluster import ROLES, Node
from sparkserve.command_line import interrupted
from sparkserve.errors import SparkserveError
from sparkserve.hosts import LocalHost
from sparkserve.inventory import list_items
from sparkserve.output import Mode, Output
from sparkserve.plan import ApplyReport, Interrupted, Plan, apply
from sparkserve.planning import look_for_weights
from sparkserve.progress import LineReporter
from sparkserve.search_program import search
from sparkserve.summary import summarize
from tests.component.weights_stage import KIB, Pair, Recorder, Silent
from tests.lab.hub import Hub
from tests.lab.model_repo import make_bench_repo
from tests.lab.repo_store import ModelRepo

SIZES = [1 << 20, 300 * KIB, 300 * KIB]
LARGE, TWIN, SMALL = "file-00001.bin", "file-00002.bin", "config.json"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> ModelRepo:
    made = make_bench_repo(tmp_path_factory.mktemp("repos"), SIZES)
    made.change(SMALL, b'{"hidden_size": 4096}', branch="main")
    return made


def plain_folder(stage: Pair, folder: Path) -> Path:
    """Lay the files out as a person does."""
    for file in stage.manifest.files:
        path = folder / "some model" / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(stage.repo.source(file.path), path)
    return folder


def hub_cache(stage: Pair, folder: Path) -> Path:
    """Lay the files out as the hub's own client does: blobs named by hash, links beside them."""
    above = folder / "models--lab--bench"
    snapshot = above / "snapshots" / stage.manifest.commit
    snapshot.mkdir(parents=True)
    (above / "blobs").mkdir()
    for file in stage.manifest.files:
        shutil.copy(stage.repo.source(file.path), above / "blobs" / file.digest)
        (snapshot / file.path).symlink_to(f"../../blobs/{file.digest}")
    return folder


def adopt(stage: Pair, *words: str) -> tuple[ApplyReport, list[str]]:
    warnings: list[str] = []
    changes = look_for_weights(stage.deployment, words, warnings.append)
    report = apply(Plan(tuple(changes)), Silent())
    report.raise_failures()
    return report, warnings


def states(folder: Path) -> dict[str, tuple[int, int, int]]:
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {str(path): (state.st_ino, state.st_size, state.st_mtime_ns) for path, state in found.items()}


def own_files(stage: Pair) -> list[str]:
    return [
        path.name for role in ROLES for path in Path(stage.node(role).models_dir).rglob("*.*") if "." in path.name[1:]
    ]


@pytest.mark.parametrize("lay_out", [plain_folder, hub_cache])
def test_whole_sets_are_used_in_place_on_both_nodes(stage: Pair, hub: Hub, tmp_path: Path, lay_out: object) -> None:
    assert callable(lay_out)
    theirs = lay_out(stage, tmp_path / "theirs")
    before = states(theirs)
    report, warnings = adopt(stage, str(theirs))
    assert (len(report.applied), warnings) == (2 * (len(SIZES) + 1), [])
    assert stage.changes() == []
    assert stage.verify().holds
    assert {name for name in own_files(stage) if not name.endswith((".json", ".lock"))} == set()
    assert states(theirs) == before
    assert hub.log() == []
    fresh = Node("worker", LocalHost("worker"), stage.deployment.settings)
    assert fresh.adopted == stage.node("worker").adopted
    assert not any(Path(place).is_symlink() for place in fresh.adopted.values())
    fresh.close()


def test_a_directory_of_many_names_is_entered_by_the_same_one_each_time(tmp_path: Path) -> None:
    for number in (3, 1, 7, 5, 9, 8, 2, 6, 4):  # a file system gives them in an order of its own
        folder = tmp_path / str(number)
        (folder / "real").mkdir(parents=True)
        (folder / "real" / LARGE).write_bytes(b"x")
        for name in "zbya":
            (folder / name).symlink_to("real")
    found = search({"folders": [str(tmp_path)], "sizes": [1]})
    wanted = [tmp_path / str(number) / "a" / LARGE for number in range(1, 10)]
    assert [row[0] for row in found["files"]] == [str(path) for path in wanted]  # type: ignore[index]


def test_only_what_is_missing_is_fetched_and_the_link_brings_what_the_other_node_has(
    stage: Pair, hub: Hub, tmp_path: Path
) -> None:
    theirs = plain_folder(stage, tmp_path / "theirs")
    (theirs / "some model" / SMALL).unlink()
    adopt(stage, f"worker:{theirs}")
    changes = {(change.node, change.resource): change.lane for change in stage.changes()}
    assert changes == {
        **{("head", f"model/{name}"): "copy" for name in (LARGE, TWIN, "file-00003.bin")},
        ("head", f"model/{SMALL}"): "download",
        ("worker", f"model/{SMALL}"): "copy",
    }
    stage.apply().raise_failures()
    assert stage.changes() == []
    assert {entry["path"].rpartition("/")[2] for entry in hub.log()} == {SMALL}


def test_of_two_files_with_one_name_and_size_the_right_one_is_found(stage: Pair, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    for release in ("a-older", "b-right"):
        (folder / release).mkdir(parents=True)
    (folder / "a-older" / LARGE).write_bytes(bytes(SIZES[0]))
    shutil.copy(stage.repo.source(LARGE), folder / "b-right" / LARGE)
    (folder / "a-older" / TWIN).write_bytes(bytes(SIZES[1]))
    report, _ = adopt(stage, f"head:{folder}")
    proofs = {item.change.resource: item.proof for item in report.applied}
    assert "in place" in proofs[f"model/{LARGE}"]
    assert f"model/{TWIN}" not in proofs
    ((change, why),) = report.left_alone
    assert (change.resource, why) == (f"model/{TWIN}", f"{folder / 'a-older' / TWIN}: wrong content")
    assert list(stage.node("head").adopted.values()) == [str(folder / "b-right" / LARGE)]


@pytest.mark.parametrize("mode", [Mode.HUMAN, Mode.QUIET])
def test_what_is_not_right_is_named_and_counted_nowhere(
    stage: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], mode: Mode
) -> None:
    theirs = plain_folder(stage, tmp_path / "theirs") / "some model"
    (theirs / LARGE).write_bytes(bytes(SIZES[0]))
    close_to_us(stage.node("head"), str(theirs / TWIN), monkeypatch)
    monkeypatch.setattr(planning, "plan_preparation", lambda _deployment: stage.changes())
    monkeypatch.setattr(lifecycle, "prepare", lambda *_given: None)
    (tmp_path / ".env").touch()
    environment = {"SPARKSERVE_WORKER": "lab-worker", "XDG_STATE_HOME": str(tmp_path / "state")}
    session = lifecycle.open_session("download", tmp_path / ".env", environment, {}, Output(mode))
    words = [f"head:{theirs}"]
    outcome = lifecycle.run_steps(session, ("download", "sync"), adopt=words, opened=stage.deployment)
    session.voice.show(tables.summary_table(outcome))
    shown = capsys.readouterr()
    wrong, closed = f"{theirs / LARGE}: wrong content", f"{theirs / TWIN}: unreadable, could not look"
    assert set(re.findall("warning: .*", shown.err)) == {
        f"warning: head: model/{LARGE} is not used in place: {wrong}",
        f"warning: head: model/{TWIN} is not used in place: {closed}",
    }
    proved = len(SIZES) + 1 - 2
    if mode is Mode.HUMAN:
        assert re.search(rf"adopt done: {proved} proved, 3\d\d\.\d kB\n", shown.err)
        assert re.search(rf"adopt +.* head +.* {proved} files, .*: size and hash right; 2 left alone", shown.out)
    data = tables.outcome_data(outcome)
    assert {row["key"]: row["why"] for row in data["left_alone"]} == {
        f"head/adopt/model/{LARGE}": wrong,
        f"head/adopt/model/{TWIN}": closed,
    }
    adopted = [row for row in data["applied"] if row["key"].startswith("head/adopt/")]
    assert (len(adopted), len(stage.node("head").adopted)) == (proved, proved)
    stop = interrupted("download", Interrupted(ApplyReport(outcome.report.applied[:proved])))
    assert stop.message.startswith(f"interrupted; {proved} changes are done and proved")
    assert stage.verify().holds


def close_to_us(node: Node, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the node program find a file closed: root, who may run the tests, can read every real one."""
    ask = node.session.ask

    def blind(do: str, **fields: Any) -> Any:
        found = ask(do, **fields)
        return (
            {**found, path: {"kind": "unreadable", "size": 0, "digest": None}}
            if do == "hash" and path in found
            else found
        )

    monkeypatch.setattr(node.session, "ask", blind)


def test_folders_in_which_nothing_is_right_are_no_step_that_is_done(stage: Pair, tmp_path: Path) -> None:
    theirs = plain_folder(stage, tmp_path / "theirs") / "some model"
    for name in (LARGE, TWIN, "file-00003.bin", SMALL):
        (theirs / name).write_bytes(bytes((theirs / name).stat().st_size))
    lines: list[str] = []
    changes = look_for_weights(stage.deployment, [f"head:{theirs}"], lines.append)
    report = apply(Plan(tuple(changes)), LineReporter(Plan(tuple(changes)), lines.append))
    (row,) = summarize("adopt", report)
    assert (row.node, row.proof) == ("head", "none; 4 left alone")
    assert [line for line in lines if "done" in line] == []


def test_an_adoption_that_cannot_be_noted_is_told(stage: Pair, tmp_path: Path) -> None:
    theirs = plain_folder(stage, tmp_path / "theirs")
    models = Path(stage.node("head").models_dir)
    models.mkdir(parents=True)
    (models / ".sparkserve").touch()
    warnings: list[str] = []
    report = apply(Plan(tuple(look_for_weights(stage.deployment, [f"head:{theirs}"], print))), Silent())
    adoption.tell_rest(report, warnings.append)
    assert len(warnings) == len(SIZES) + 1
    assert report.applied == []


def test_a_preview_takes_the_names_for_the_files_and_notes_nothing(stage: Pair, tmp_path: Path) -> None:
    theirs = plain_folder(stage, tmp_path / "theirs")
    look_for_weights(stage.deployment, [f"head:{theirs}"], print, only_assume=True)
    head = {(change.lane, change.before.partition(" (")[0]) for change in stage.changes() if change.node == "head"}
    assert head == {("hash", "not proved")}
    assert not (Path(stage.node("head").models_dir) / ".sparkserve" / "adopted.json").exists()


def test_what_vanishes_or_changes_later_is_named_with_its_place(stage: Pair, tmp_path: Path) -> None:
    theirs = plain_folder(stage, tmp_path / "theirs") / "some model"
    adopt(stage, str(theirs))
    shutil.move(theirs / LARGE, tmp_path / "elsewhere")
    (theirs / TWIN).write_bytes(bytes(SIZES[1]))
    found = {(row.node, Path(row.path).name): row for row in stage.verify().findings}
    assert {key: row.problem.partition(" (")[0] for key, row in found.items()} == {
        ("head", LARGE): "missing", ("head", TWIN): "wrong content",
        ("worker", LARGE): "missing", ("worker", TWIN): "wrong content",
    }  # fmt: skip
    assert {row.place for row in found.values()} == {str(theirs / LARGE), str(theirs / TWIN)}
    stage.apply().raise_failures()
    assert stage.changes() == []
    assert (theirs / TWIN).read_bytes() == bytes(SIZES[1])
    assert stage.path("head", TWIN).read_bytes() == stage.repo.source(TWIN).read_bytes()


def test_files_that_are_proved_already_are_not_looked_at(stage: Pair, tmp_path: Path) -> None:
    stage.apply().raise_failures()
    report, warnings = adopt(stage, str(plain_folder(stage, tmp_path / "theirs")))
    assert report.applied == []
    assert "still wanted" in warnings[0]
    assert stage.node("head").adopted == {}


def test_loops_dead_links_pipes_and_closed_directories(stage: Pair, tmp_path: Path) -> None:
    theirs = plain_folder(stage, tmp_path / "theirs")
    (theirs / "loop").symlink_to(theirs)
    (theirs / "dead").symlink_to("/nowhere")
    os.mkfifo(theirs / LARGE)
    report, _ = adopt(stage, str(theirs))
    assert len(report.applied) == 2 * (len(SIZES) + 1)


def test_a_folder_that_is_nowhere_is_an_error_and_one_node_is_enough(stage: Pair, tmp_path: Path) -> None:
    with pytest.raises(SparkserveError, match="there is no folder /no/such") as caught:
        adopt(stage, "/no/such", f"head:{tmp_path}")
    assert (caught.value.code, caught.value.exit_code) == ("adopt_missing", 2)
    with pytest.raises(SparkserveError, match=r"/no/other"):
        adopt(stage, "worker:/no/other", str(tmp_path))


def test_words_become_folders_of_nodes(tmp_path: Path) -> None:
    found = parse_folders(["/a", "head:b", "worker:~/c", "d:e"], tmp_path)
    assert found == {
        "head": ["/a", str(tmp_path / "b"), str(tmp_path / "d:e")],
        "worker": ["/a", "~/c", str(tmp_path / "d:e")],
    }
    with pytest.raises(SparkserveError, match="relative"):
        parse_folders(["worker:c"], tmp_path)


def test_the_likeliest_place_comes_first(stage: Pair) -> None:
    item = next(one for one in list_items(stage.deployment.lock) if one.file.path == LARGE)
    commit, digest, size = stage.manifest.commit, item.file.digest, item.file.size
    rows = [
        Found(f"/a/{LARGE}", f"/a/{LARGE}", size),
        Found(f"/b/{commit}/{LARGE}", f"/b/{commit}/{LARGE}", size),
        Found(f"/c/blobs/{digest}", f"/c/blobs/{digest}", size),
        Found(f"/c/snapshots/{commit}/{LARGE}", f"/c/blobs/{digest}", size),
        Found(f"/d/{LARGE}", f"/d/{LARGE}", size + 1),
        Found("/e/other.bin", "/e/other.bin", size),
    ]
    assert choose(item, rows) == [f"/c/blobs/{digest}", f"/b/{commit}/{LARGE}", f"/a/{LARGE}"]


def test_an_interrupted_adoption_keeps_what_was_proved(stage: Pair, tmp_path: Path) -> None:
    theirs = plain_folder(stage, tmp_path / "theirs")
    found = adoption.find(stage.deployment, parse_folders([f"head:{theirs}"], tmp_path))
    first, *_ = adoption.plan(stage.deployment, stage.facts(), found)
    assert "in place" in first.action(Recorder())
    fresh = Node("head", LocalHost("head"), stage.deployment.settings)
    assert len(fresh.adopted) == 1
    fresh.close()
    again = adoption.plan(stage.deployment, stage.facts(), found)
    assert first.key not in {change.key for change in again}


def test_many_changes_note_their_files_side_by_side(stage: Pair, tmp_path: Path) -> None:
    theirs = plain_folder(stage, tmp_path / "theirs")
    found = adoption.find(stage.deployment, parse_folders([f"head:{theirs}"], tmp_path))
    changes = adoption.plan(stage.deployment, stage.facts(), found)
    threads = [threading.Thread(target=change.action, args=(Recorder(),)) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert weights.bytes_missing(stage.deployment.lock, stage.facts()["head"]) == 0
    assert len(stage.node("head").adopted) == len(SIZES) + 1
