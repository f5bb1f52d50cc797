"""Another recipe, another setting, and the way back to the pair that answered; what each start leaves behind."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import pytest

from tests.e2e.conftest import OTHER
from tests.e2e.test_engine_faults import RANKS, names, state, text_of
from tests.lab.node import LabNode
from tests.lab.pair import HOME, TOKEN, Pair

pytestmark = pytest.mark.faults


def served(pair: Pair) -> list[str]:
    answer = pair.head.run(["curl", "-sf", "http://127.0.0.1:8888/v1/models"]).stdout
    return [item["id"] for item in json.loads(answer)["data"]]


def runs(pair: Pair) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pair.ask("history")["data"]["runs"]
    return found


def test_a_switch_makes_everything_ready_first_and_every_look_follows_it(other: Pair) -> None:
    before = len(other.logins())
    answer = other.ask("start", "--recipe", OTHER)
    assert answer["exit_code"] == 0, answer["errors"]
    # What is shipped goes over the cable, on connections of its own.
    assert other.logins()[before:].count(other.head.management_address) == 1
    steps = [item["key"].split("/")[1] for item in answer["data"]["applied"]]
    assert "ship" in steps[: steps.index("start")], "the new image comes before the old pair goes"
    assert served(other) == ["Other"]
    assert state(other)[0] == "running"
    assert other.ask("status", "--recipe", f"{HOME}/recipes/lab")["data"]["reasons"][0].endswith(
        "serves recipe other, not lab"
    )
    assert other.ask("start")["exit_code"] == 0
    assert served(other) != ["Other"]
    assert state(other)[0] == "running"


def test_a_switch_that_cannot_be_prepared_leaves_the_pair_alone(other: Pair) -> None:
    before = [node.docker("ps", "-q") for node in other.lab.nodes]
    text = other.head.run(["cat", f"{HOME}/recipes/lab/recipe.toml"]).stdout.decode()
    engine = next(line for line in text.splitlines() if line.startswith("engine_repository"))
    other.write(
        f"{OTHER}/recipe.toml", text.replace(engine, f'{engine[:-5]}nosuch.git"').replace('"lab"', '"other"', 1)
    )
    assert other.ask("start", "--recipe", OTHER)["exit_code"] != 0
    assert [node.docker("ps", "-q") for node in other.lab.nodes] == before
    assert state(other)[0] == "running"


def test_the_pair_that_answered_comes_back(other: Pair) -> None:
    before = [
        node.docker("inspect", "--format", "{{.Args}}", name) for node, name in zip(other.lab.nodes, RANKS, strict=True)
    ]
    bad = 'schema = 1\nextends = "lab"\nname = "other"\n[launch.env]\nNCCL_SOCKET_IFNAME = "nosuch0"\n'
    other.write(f"{OTHER}/recipe.toml", bad)
    answer = other.ask("start", "--recipe", OTHER)
    assert answer["exit_code"] == 1
    told = text_of(answer)
    assert "the earlier pair (lab, run " in told
    assert "was brought back: answered" in told
    assert state(other)[0] == "running"
    after = [
        node.docker("inspect", "--format", "{{.Args}}", name) for node, name in zip(other.lab.nodes, RANKS, strict=True)
    ]
    assert after == before
    assert other.sparkserve("start").stdout.strip() == b"No changes"


def test_a_setting_that_breaks_the_engine_is_named_and_undone(serving: Pair) -> None:
    before = [node.docker("ps", "-q") for node in serving.lab.nodes]
    serving.write_settings(SPARKSERVE_EXTRA_ARGS="--no-such-flag")
    answer = serving.ask("start")
    assert [error["code"] for error in answer["errors"]] == ["image_flags"]
    assert "does not know --no-such-flag" in text_of(answer)
    assert "SPARKSERVE_EXTRA_ARGS: not set -> ('--no-such-flag',)" in text_of(answer)
    assert [node.docker("ps", "-q") for node in serving.lab.nodes] == before, "a flag is refused before anything stops"
    # The engine knows the flag, and not the value.
    serving.write_settings(SPARKSERVE_EXTRA_ARGS="--backend none")
    answer = serving.ask("start")
    assert answer["exit_code"] == 1
    told = text_of(answer)
    assert "changed since run" in told
    assert "SPARKSERVE_EXTRA_ARGS: not set -> ('--backend', 'none')" in told
    assert "was brought back" in told
    serving.write_settings()
    assert serving.ask("start")["data"]["changes"] == []
    endings = [run["ending"] for run in runs(serving)]
    assert endings[:3] == ["failed", "failed", "answered"], "the refused flag, the refused value, the pair before"


def test_both_failing_is_told_and_leaves_nothing(serving: Pair) -> None:
    serving.write_settings(SPARKSERVE_CONTEXT="32768")
    serving.script_engine(exit_at={"at": "loading", "code": 3, "log": ["ValueError: broken for good"]})
    answer = serving.ask("start")
    assert answer["exit_code"] == 1
    assert "did not come back either" in text_of(answer)
    assert names(serving) == []


def prunable(pair: Pair, *words: str) -> dict[tuple[str, str], int]:
    rows = pair.ask("prune", "--dry-run", *words)["data"]["changes"]
    return {(row["node"], row["resource"]): row["size"] for row in rows}


def test_prune_keeps_what_the_lock_of_another_recipe_names(other: Pair) -> None:
    assert other.ask("start", "--recipe", OTHER)["exit_code"] == 0
    assert other.ask("start")["exit_code"] == 0
    image = other.head.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "sparkserve/other").strip()
    kept = {("head", image), ("worker", image)}
    assert not kept & prunable(other).keys()
    other.head.run(["rm", "sparkserve.other.lock.json"])
    assert kept <= prunable(other).keys()


def test_the_build_cache_goes_only_when_it_is_named(serving: Pair) -> None:
    cache = ("head", "Docker's build cache")
    assert cache not in prunable(serving)
    assert "build cache holds" in serving.sparkserve("prune", "--dry-run").stderr.decode()
    assert prunable(serving, "--build-cache")[cache] > 0
    answer = serving.ask("prune", "--build-cache", "--yes")
    assert answer["exit_code"] == 0, answer["errors"]
    assert any(row["key"] == "head/prune/Docker's build cache" for row in answer["data"]["applied"])
    assert cache not in prunable(serving, "--build-cache")
    assert state(serving)[0] == "running"


def test_records_and_saved_logs_of_a_run(serving: Pair) -> None:
    run = runs(serving)[0]
    assert (run["ending"], run["command"]) == ("answered", "start")
    assert any(name.startswith("rank 0: loading layers") for name in run["phases"])
    assert serving.ask("stop")["exit_code"] == 0
    lines = serving.ask("logs", "--run", run["run"])["data"]["lines"]
    assert {line["rank"] for line in lines} == {0, 1}
    assert serving.ask("logs", "--run", "last", "--grep", "engine ready")["data"]["lines"]
    assert serving.ask("logs", "--run", "nosuch")["errors"][0]["code"] == "run_unknown"
    assert serving.sparkserve("logs", "--run", "last", "--follow").returncode == 2


@contextmanager
def journal(node: LabNode, lines: list[str]) -> Iterator[None]:
    """Give a node a kernel journal."""
    program = node.root / "usr/local/bin/journalctl"
    program.write_text("".join(["#!/bin/sh\n", *(f"echo '{line}'\n" for line in lines)]))
    program.chmod(0o755)
    try:
        yield
    finally:
        program.unlink()


def test_an_archive_for_a_bug_report(serving: Pair) -> None:
    line = "2026-11-30T08:00:00+0000 spark kernel: "
    lines = [f"{line}Out of memory: Killed process 7 (engine) {TOKEN}", f"{line}usb 1-1: new device"]
    with journal(serving.worker, lines):
        planned = serving.ask("diagnose", "--to", HOME, "--dry-run")
        assert serving.head.run(["ls", planned["data"]["path"]], check=False).stdout == b""
        answer = serving.ask("diagnose", "--to", HOME)
    assert answer["exit_code"] == planned["exit_code"] == 0
    names = [[member["name"] for member in one["data"]["members"]] for one in (planned, answer)]
    assert names[0] == names[1]
    assert serving.ask("diagnose", "--to", "/nosuch", "--dry-run")["exit_code"] != 0
    path = answer["data"]["path"]
    assert serving.head.run(["stat", "-c", "%a", path]).stdout.strip() == b"600"
    content = serving.head.run(["cat", path]).stdout
    with tarfile.open(fileobj=BytesIO(content)) as archive:
        texts = {name.partition("/")[2]: _read(archive, name) for name in archive.getnames()}
    assert set(texts) == {member["name"] for member in answer["data"]["members"]}
    for text in texts.values():
        assert TOKEN not in text
        assert serving.head.password not in text
    facts = json.loads(texts["worker.json"])
    assert facts["ours"]["containers"][0]["name"] == RANKS[1]
    assert facts["around"]["gpu"]["clock_mhz"] == 208
    assert facts["link"]["interface"] == serving.worker.link_interface
    assert "engine ready" in texts["logs.txt"]
    assert json.loads(texts["plan.json"])["specs"]["head"]["name"] == RANKS[0]
    assert texts["worker-kernel.txt"] == f"{line}Out of memory: Killed process 7 (engine) ***\n"
    values = {row["name"]: row["value"] for row in json.loads(texts["settings.json"])}
    assert values["SPARKSERVE_WORKER"] == f"spark@{serving.worker.management_address}"
    assert (values["HF_TOKEN"], values["SPARKSERVE_API_KEY_FILE"]) == ("***", None)


def _read(archive: tarfile.TarFile, name: str) -> str:
    member = archive.extractfile(name)
    assert member is not None
    return member.read().decode()


def test_an_archive_without_a_worker_says_so(serving: Pair) -> None:
    serving.worker.stop_sshd()
    try:
        answer = serving.ask("diagnose", "--to", HOME)
    finally:
        serving.worker.start_sshd()
    assert answer["exit_code"] == 0
    content = serving.head.run(["tar", "-xzOf", answer["data"]["path"], "--wildcards", "*/worker.json"]).stdout
    assert "cannot reach" in json.loads(content)["could not look"]


def test_an_archive_of_a_node_without_a_docker_engine_has_all_the_rest(serving: Pair) -> None:
    line = "2026-11-30T08:00:00+0000 spark kernel: Out of memory: Killed process 7 (dockerd)"
    serving.worker.stop_docker()
    try:
        with journal(serving.worker, [line]):
            answer = serving.ask("diagnose", "--to", HOME)
    finally:
        serving.worker.start_docker()
    assert answer["exit_code"] == 0
    with tarfile.open(fileobj=BytesIO(serving.head.run(["cat", answer["data"]["path"]]).stdout)) as archive:
        texts = {name.partition("/")[2]: _read(archive, name) for name in archive.getnames()}
    facts = json.loads(texts["worker.json"])
    assert "Docker" in facts["ours"]["could not look"]
    assert facts["link"]["interface"] == serving.worker.link_interface
    assert facts["around"]["gpu"]["clock_mhz"] == 208
    assert texts["worker-kernel.txt"] == f"{line}\n"
