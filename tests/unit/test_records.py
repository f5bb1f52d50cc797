from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkserve import records, state_file
from sparkserve.container import build_spec
from sparkserve.endpoint import Endpoint
from sparkserve.engine_watch import Launch
from sparkserve.records import Record, Wanted
from tests.unit.deployments import FILES, IMAGE, LINKS, make_deployment

SECRET = "hf_never_to_be_kept"


def make_record(run: str = "run-1", *, skipped_checks: tuple[str, ...] = (), **changes: int) -> Record:
    deployment = make_deployment({"hf_token": SECRET, "context": 4096, **changes})
    specs = {role: build_spec(deployment, rank, LINKS, FILES, IMAGE) for rank, role in enumerate(LINKS)}
    launch = Launch(specs, run, Endpoint("http://127.0.0.1:8888", "flash"), Path("runs"), kernels={"head": "6.17"})
    launch = replace(launch, skipped_checks=skipped_checks)
    launch.phases["rank 0: loading layers 3"] = 1.23456
    record = records.open_record("start", deployment, launch)
    records.close_record(record, "answered", launch)
    return record


def test_what_was_recorded_brings_the_same_pair_back(tmp_path: Path) -> None:
    record = make_record()
    records.save_record(tmp_path, record)
    (found,) = records.read_records(tmp_path)
    deployment = make_deployment({"context": 4096})
    pair = records.pair_of(found)
    assert pair is not None
    for rank, role in enumerate(LINKS):
        spec = build_spec(deployment, rank, LINKS, FILES, IMAGE).of_run("run-1")
        assert pair.specs[role] == spec
    assert pair.recipe.model_dump() == deployment.recipe.model_dump()
    assert pair.lock == deployment.lock
    assert (pair.base_url, pair.model) == ("http://127.0.0.1:8888", "flash")
    assert found.phases == {"rank 0: loading layers 3": 1.235}


@pytest.mark.parametrize("spoilt", [{}, {"recipe": {"name": "of another version"}}, {"base_url": None}])
def test_a_pair_that_another_version_wrote_brings_nothing_back(spoilt: dict[str, object]) -> None:
    record = make_record()
    assert records.pair_of(replace(record, pair={**record.pair, **spoilt} if spoilt else {})) is None
    assert records.pair_of(None) is None


def test_the_same_pair_is_told_from_another() -> None:
    record = make_record()
    newer = replace(record, decided={**record.decided, "kernel of the head": "6.18", "image id of the head": "b"})
    assert records.is_same_pair(newer, record)
    assert not records.is_same_pair(make_record(context=8192), record)


def test_an_image_that_a_failed_start_never_saw_is_no_change() -> None:
    record = make_record()
    ids = [replace(record, decided={**record.decided, "image id of the head": one}) for one in ("a", "b")]
    assert records.changed_since(record, ids[0]) == []
    assert records.changed_since(ids[1], ids[0]) == ["image id of the head: a -> b"]


def test_a_record_holds_no_secret_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    records.save_record(tmp_path, make_record())
    path = tmp_path / "run-1" / "record.json"
    assert SECRET not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_changed_since_it_worked() -> None:
    before, now = make_record(), make_record(context=8192, requests=2)
    now = replace(now, decided={**now.decided, "kernel of the head": "6.18"})
    changed = records.changed_since(now, before)
    assert "SPARKSERVE_CONTEXT: 4096 -> 8192" in changed
    assert "SPARKSERVE_REQUESTS: not set -> 2" in changed
    assert "kernel of the head: 6.17 -> 6.18" in changed
    assert any(line.startswith("spec of the head: ") for line in changed)
    assert records.changed_since(before, before) == []


def test_newest_first_and_the_oldest_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_KEPT", 3)
    for number in range(5):
        records.save_record(tmp_path, replace(make_record(), run=f"run-{number}"))
    assert [one.run for one in records.read_records(tmp_path)] == ["run-4", "run-3", "run-2"]


def test_the_last_that_answered_stays_however_often_a_start_was_refused_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_KEPT", 3)
    for number in range(6):
        ending: records.Ending = "answered" if number < 2 else "failed"
        records.save_record(tmp_path, replace(make_record(), run=f"run-{number}", ending=ending))
    assert [one.run for one in records.read_records(tmp_path)] == ["run-5", "run-4", "run-3", "run-1"]


def test_records_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    records.save_record(tmp_path, make_record())
    for name, text in (("run-2", "{"), ("run-3", '{"run": "of another version"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(text)
    assert [one.run for one in records.read_records(tmp_path)] == ["run-1"]


def test_the_last_that_answered() -> None:
    failed = replace(make_record("c"), ending="failed")
    found = [failed, make_record("b"), make_record("a")]
    assert [getattr(records.last_answered(found, run), "run", None) for run in ("", "a", "c", "none")] == [
        "b", "a", None, None,
    ]  # fmt: skip


def test_what_a_start_left_out_is_known_to_a_restart() -> None:
    record = make_record(skipped_checks=("memory", "swap"))
    assert record.decided["skipped checks"] == "memory swap"
    assert records.skipped_checks(record) == ("memory", "swap")
    assert records.skipped_checks(make_record()) == records.skipped_checks(None) == ()
    assert records.changed_since(make_record(), record) == ["skipped checks: memory swap -> not set"]


def test_what_the_owner_wants(tmp_path: Path) -> None:
    assert records.read_wanted(tmp_path) == Wanted(serving=False)
    records.keep_wanted(tmp_path, serving=True, recipe="lab")
    wanted = records.read_wanted(tmp_path)
    assert (wanted.serving, wanted.recipe) == (True, "lab")
    assert wanted.since > 0
    records.keep_wanted(tmp_path, serving=False)
    assert not records.read_wanted(tmp_path).serving


@pytest.mark.parametrize("text", ['{"other": 1}', '{"serving": "of course", "since": []}', "[1]", "{"])
def test_a_word_of_the_owner_in_another_shape_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "wanted.json").write_text(text)
    assert records.read_wanted(tmp_path) == Wanted(serving=False)


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_broken_state_file_is_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    assert state_file.read(path) == {}
    state_file.write(path, {"a": 1})
    assert state_file.read(path) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
