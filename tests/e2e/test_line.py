"""One pass of the line as an owner types it: up, up again, status, verify, logs, stop, stop again."""

from __future__ import annotations

import fcntl
import json
from typing import Any

import pytest

from tests.e2e.refusal import EVERYWHERE, LOCK, connections, look
from tests.lab.pair import TOKEN, Pair

pytestmark = pytest.mark.lab

STEPS = ["download", "sync", "template", "build", "ship", "tune", "start"]


@pytest.fixture(scope="module")
def first(shared_pair: Pair) -> dict[str, Any]:
    """The first `up` of a pair that has nothing."""
    shared_pair.reset()
    shared_pair.forget_everything()
    answer = shared_pair.ask("up")
    assert answer["exit_code"] == 0, answer
    return answer


def test_a_dry_run_on_a_pair_that_has_nothing_resolves_in_memory_and_touches_nothing(shared_pair: Pair) -> None:
    """This one comes before `first`, which has to make all that is gone here."""
    shared_pair.reset()
    shared_pair.forget_everything()
    before = look(shared_pair, EVERYWHERE)
    answer = shared_pair.ask("up", "--dry-run")
    assert answer["exit_code"] == 0, answer["errors"]
    steps = {change["step"] for change in answer["data"]["changes"]}
    assert [step for step in STEPS if step not in steps] == []
    assert look(shared_pair, EVERYWHERE) == before
    assert not (shared_pair.head.root / LOCK[1:]).exists()


def test_up_does_every_step_with_a_proof(first: dict[str, Any]) -> None:
    applied = first["data"]["applied"]
    steps = [item["key"].split("/")[1] for item in applied]
    assert [step for step in STEPS if step not in steps] == []
    assert all(item["proof"] for item in applied)
    assert not first["data"]["failed"]
    assert not first["data"]["not_reached"]


def test_up_verifies_the_endpoint_by_the_five_requests(first: dict[str, Any]) -> None:
    proofs = {proof["name"]: proof["verdict"] for proof in first["data"]["proofs"]}
    assert proofs == dict.fromkeys(("answer", "thinking", "tool", "schema", "needle"), "ok")


@pytest.mark.usefixtures("first")
def test_every_weights_file_is_regular_and_right_on_both_nodes(shared_pair: Pair) -> None:
    lock = json.loads((shared_pair.head.root / "home/spark/sparkserve.lock.json").read_text())
    assert [len(manifest["files"]) for manifest in lock["weights"]] == [43, 2]
    for node in shared_pair.lab.nodes:
        for manifest in lock["weights"]:
            folder = node.root / "home/spark/sparkserve/models" / manifest["repository"] / manifest["commit"]
            for file in manifest["files"]:
                path = folder / file["path"]
                assert path.is_file()
                assert not path.is_symlink()
                assert path.stat().st_size == file["size"]
            assert sorted(path.name for path in folder.iterdir() if path.is_file()) == sorted(
                file["path"] for file in manifest["files"]
            )


@pytest.mark.usefixtures("first")
def test_a_second_up_changes_nothing(shared_pair: Pair) -> None:
    answer = shared_pair.sparkserve("up")
    assert answer.returncode == 0
    assert answer.stdout.decode().startswith("No changes")
    assert shared_pair.ask("start")["data"]["changes"] == []
    assert shared_pair.sparkserve("up", "--check").returncode == 0


@pytest.mark.usefixtures("first")
def test_status_of_a_serving_pair(shared_pair: Pair) -> None:
    answer = shared_pair.ask("status")
    assert answer["exit_code"] == 0
    assert answer["data"]["state"] == "running"
    assert {node["container"] for node in answer["data"]["nodes"].values()} == {"running"}


@pytest.mark.usefixtures("first")
def test_ranks_get_the_names_of_their_own_node(shared_pair: Pair) -> None:
    for node, rank in ((shared_pair.head, 0), (shared_pair.worker, 1)):
        found = json.loads(node.docker("inspect", f"sparkserve-rank{rank}"))[0]
        env = dict(item.split("=", 1) for item in found["Config"]["Env"])
        assert env["NCCL_SOCKET_IFNAME"] == node.link_interface
        assert env["NCCL_IB_GID_INDEX"] == {0: "3", 1: "5"}[rank]
        assert not found["HostConfig"]["Privileged"]
        assert "no-new-privileges" in found["HostConfig"]["SecurityOpt"]


@pytest.mark.usefixtures("first")
def test_no_secret_is_left_in_sight(shared_pair: Pair) -> None:
    state = shared_pair.head.run(["sh", "-c", "cat ~/sparkserve.lock.json; grep -r . ~/.local/state/sparkserve"])
    shown = [state.stdout.decode()]
    shown += [node.docker("inspect", f"sparkserve-rank{rank}") for rank, node in enumerate(shared_pair.lab.nodes)]
    shown += [
        shared_pair.sparkserve("config").stdout.decode(),
        shared_pair.sparkserve("config", "--json").stdout.decode(),
    ]
    for text in shown:
        assert TOKEN not in text
        assert shared_pair.head.password not in text


@pytest.mark.usefixtures("first")
def test_logs_of_both_ranks_are_interleaved(shared_pair: Pair) -> None:
    lines = shared_pair.ask("logs")["data"]["lines"]
    assert {line["rank"] for line in lines} == {0, 1}
    assert [line["moment"] for line in lines] == sorted(line["moment"] for line in lines)


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize(
    "commands",
    ["status", "start", "up --dry-run", "logs", "tune", "diagnose --to /tmp", "stop; start"],
)
def test_a_command_opens_one_connection_to_the_worker(shared_pair: Pair, commands: str) -> None:
    for command in commands.split("; "):
        before = len(shared_pair.logins())
        assert shared_pair.ask(*command.split())["exit_code"] == 0
        assert shared_pair.logins()[before:] == [shared_pair.head.management_address]


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize(
    ("line", "count"),
    [
        ("verify", 0),
        ("plan --live", 1),
        ("init --yes --force --recipe recipes/lab", 1),
        ("weights verify --repair", 2),  # one of them carries the file, as all bulk data
    ],
)
def test_other_commands_open_one_connection_and_those_of_bulk_data(shared_pair: Pair, line: str, count: int) -> None:
    models = shared_pair.worker.root / "home/spark/sparkserve/models"
    if "--repair" in line:
        next(models.rglob("tokenizer_config.json")).write_text("{}")
    before = connections(shared_pair)
    answer = shared_pair.ask(*line.split())
    shared_pair.write_settings()
    assert answer["exit_code"] == 0, answer
    assert connections(shared_pair) - before == count


@pytest.mark.usefixtures("first")
@pytest.mark.parametrize(
    "line",
    [
        *("up", "start", "stop --force", "download", "sync", "template", "build --no-cache", "tune", "tune --undo"),
        *("lock --update", "prune --build-cache", "weights verify --repair", "service install", "service remove"),
        "init --yes --recipe recipes/lab",
    ],
)
def test_a_dry_run_touches_nothing_also_beside_a_command_at_work(shared_pair: Pair, line: str) -> None:
    before, logins = look(shared_pair, EVERYWHERE), connections(shared_pair)
    with (shared_pair.head.root / "home/spark/.local/state/sparkserve/lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        answer = shared_pair.ask(*line.split(), "--dry-run")
    assert answer["exit_code"] == 0, answer
    assert look(shared_pair, EVERYWHERE) == before
    assert connections(shared_pair) - logins == (not line.startswith(("lock", "service")))


@pytest.mark.usefixtures("first")
def test_a_dry_run_of_init_shows_the_file(shared_pair: Pair) -> None:
    shown = shared_pair.sparkserve("init", "--yes", "--recipe", "recipes/lab", "--dry-run").stdout.decode()
    assert f"SPARKSERVE_HEAD_LINK={shared_pair.head.link_address}" in shown
    assert TOKEN not in shown


@pytest.mark.usefixtures("first")
def test_stop_leaves_nothing_and_stop_again_says_so(shared_pair: Pair) -> None:
    assert shared_pair.ask("stop")["exit_code"] == 0
    for node in shared_pair.lab.nodes:
        assert node.docker("ps", "-aq") == ""
    again = shared_pair.sparkserve("stop")
    assert again.returncode == 0
    assert b"nothing of ours was running" in again.stdout
    assert shared_pair.ask("status")["exit_code"] == 5


@pytest.mark.usefixtures("first")
def test_tuning_can_be_undone(shared_pair: Pair) -> None:
    assert (shared_pair.head.root / "etc/sysctl.d/90-sparkserve.conf").exists()
    assert shared_pair.ask("tune", "--undo")["exit_code"] == 0
    for node in shared_pair.lab.nodes:
        assert node.run(["cat", "/proc/sys/vm/swappiness"]).stdout.strip() == b"60"
        assert not node.run(["ls", "/etc/sysctl.d"]).stdout.count(b"sparkserve")
    assert shared_pair.ask("tune")["exit_code"] == 0
