"""Weights of others used in place, what `weights`, `lock --check` and `prune` say, and a worker that goes away."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab.model_repo import MODEL_NAME
from tests.lab.node import LabNode
from tests.lab.pair import HOME, SOURCE, TOKEN, Pair
from tests.lab.repo_store import ModelRepo

pytestmark = pytest.mark.faults
MODELS = f"{HOME}/sparkserve/models"
THEIRS = "/srv/theirs"
SHARD = "model-00003-of-00039.safetensors"
FILES = 45


def lock_of(pair: Pair) -> dict[str, Any]:
    text = (pair.head.root / HOME[1:] / "sparkserve.lock.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def folder_of(pair: Pair) -> str:
    manifest = lock_of(pair)["weights"][0]
    return f"{MODELS}/{manifest['repository']}/{manifest['commit']}"


def succeed(pair: Pair, *words: str) -> dict[str, Any]:
    answer = pair.ask(*words)
    assert answer["exit_code"] == 0, answer["errors"]
    data: dict[str, Any] = answer["data"]
    return data


def served(pair: Pair) -> list[str]:
    return [request["path"] for request in pair.hub.log() if request["host"] == "content"]


def findings(pair: Pair, *words: str) -> tuple[int, set[tuple[str, str, str]]]:
    answer = pair.ask("weights", "verify", *words)
    rows = [(row["node"], row["path"].rpartition("/")[2], row["problem"]) for row in answer["data"]["findings"]]
    return answer["exit_code"], {(node, path, problem.partition(" (")[0]) for node, path, problem in rows}


@pytest.fixture
def whole(prepared: Pair) -> Iterator[Pair]:
    """A pair with weights of its own on both nodes, and with them again in the end."""
    yield prepared
    prepared.reset()
    for node in prepared.lab.nodes:
        node.run(["sh", "-c", f"if mountpoint -q {THEIRS}; then umount -l {THEIRS}; fi; rm -rf {THEIRS}"], user="root")
        node.run(["rm", "-f", f"{MODELS}/.sparkserve/adopted.json"])
    prepared.head.run(["sh", "-c", "if [ -e kept.json ]; then mv kept.json sparkserve.lock.json; fi"])
    succeed(prepared, "download")


def lend(node: LabNode) -> None:
    """Move all weights to a file system that is read-only and whose files belong to root."""
    script = f"mkdir {THEIRS}; mount -t tmpfs -o size=200m none {THEIRS}; cp -r {MODELS}/*/ {THEIRS}"
    node.run(["sh", "-ec", f"{script}; mount -o remount,ro {THEIRS}; rm -rf {MODELS}"], user="root")


def test_files_of_root_on_a_read_only_disk_are_used_and_missed_when_they_vanish(whole: Pair) -> None:
    for node in whole.lab.nodes:
        lend(node)
    whole.hub.state.log.clear()
    preview = succeed(whole, "download", "--adopt", THEIRS, "--dry-run")
    weights = [change for change in preview["changes"] if change["step"] in ("download", "sync")]
    assert {change["before"].partition(" (")[0] for change in weights} == {"not proved"}
    done = succeed(whole, "download", "--adopt", THEIRS)
    assert sum("in place" in row["proof"] for row in done["applied"]) == 2 * FILES
    planned = succeed(whole, "up", "--dry-run")["changes"]
    assert {change["step"] for change in planned} & {"download", "sync"} == set()
    for node in whole.lab.nodes:
        assert node.run(["find", MODELS, "-name", "*.safetensors"]).stdout == b""
    assert {row["adopted"] for row in succeed(whole, "weights", "list")["sets"]} == {43, 2}
    assert findings(whole) == (0, set())

    succeed(whole, "template")  # its remembered hash went away with our directory
    succeed(whole, "start")
    mounts = json.loads(whole.worker.docker("inspect", "sparkserve-rank1"))[0]["Mounts"]
    assert sum(mount["Source"].startswith(THEIRS) for mount in mounts) >= FILES - 1
    succeed(whole, "prune", "--yes")
    assert served(whole) == []
    succeed(whole, "stop")

    path = f"{folder_of(whole).replace(MODELS, THEIRS)}/{SHARD}"
    change = f"printf x | dd of={path} bs=1 seek=5000 conv=notrunc"
    whole.worker.run(
        ["sh", "-ec", f"mount -o remount,rw {THEIRS}; {change}; mount -o remount,ro {THEIRS}"], user="root"
    )
    changed = (whole.worker.root / path[1:]).read_bytes()
    assert findings(whole) == (1, {("worker", SHARD, "wrong content")})
    succeed(whole, "download")
    assert findings(whole) == (0, set())
    assert (whole.worker.root / path[1:]).read_bytes() == changed

    whole.worker.run(["umount", THEIRS], user="root")
    code, rows = findings(whole)
    assert (code, {(node, problem) for node, _, problem in rows}, len(rows)) == (1, {("worker", "missing")}, FILES - 1)
    assert whole.ask("start")["errors"][0]["code"] == "not_prepared"
    succeed(whole, "download")
    assert served(whole) == []  # the head has them: they came over the link
    assert findings(whole) == (0, set())


def test_a_cache_of_the_hubs_own_client_on_one_node(whole: Pair) -> None:
    for node in whole.lab.nodes:
        node.run(["rm", "-rf", MODELS])
    hf = [str(SOURCE / ".venv/bin/hf"), "download", MODEL_NAME, "--revision", whole.commits[MODEL_NAME]]
    environment = {"HF_ENDPOINT": whole.hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_TELEMETRY": "1"}
    whole.head.run(hf, env={"HOME": HOME, **environment}, timeout=120)
    before = whole.head.run(["sh", "-c", "cd ~/.cache/huggingface/hub && find . -ls | sort"]).stdout
    whole.hub.state.log.clear()
    done = succeed(whole, "download", "--adopt", f"head:{HOME}/.cache/huggingface/hub")
    assert sum("in place" in row["proof"] for row in done["applied"]) == 43
    assert sum(request["bytes_sent"] for request in whole.hub.log() if request["host"] == "content") < 21_000_000
    assert whole.head.run(["sh", "-c", "cd ~/.cache/huggingface/hub && find . -ls | sort"]).stdout == before
    assert findings(whole) == (0, set())
    whole.head.run(["rm", "-rf", f"{HOME}/.cache/huggingface"])
    code, rows = findings(whole)
    assert (code, {(node, problem) for node, _, problem in rows}) == (1, {("head", "missing")})


def test_verify_names_what_is_wrong_and_repairs_from_the_other_node(whole: Pair) -> None:
    for harm in (
        [f"printf x | dd of={SHARD} bs=1 seek=5000 conv=notrunc", "truncate --size=5 config.json"],
        ["rm tokenizer.json", "echo mine > notes.txt"],
    ):
        node = whole.worker if SHARD in harm[0] else whole.head
        node.run(["sh", "-ec", "; ".join([f"cd {folder_of(whole)}", *harm])])
    whole.hub.state.log.clear()
    code, rows = findings(whole)
    assert (code, rows) == (1, {
        ("worker", SHARD, "wrong content"), ("worker", "config.json", "short"),
        ("head", "tokenizer.json", "missing"), ("head", "notes.txt", "extra"),
    })  # fmt: skip
    assert findings(whole, "--repair") == (0, {("head", "notes.txt", "extra")})
    assert [request for request in whole.hub.log() if request["path"].endswith(("config.json", SHARD))] == []
    assert served(whole) == []
    assert findings(whole, "--full") == (0, {("head", "notes.txt", "extra")})
    whole.head.run(["rm", f"{folder_of(whole)}/notes.txt"])


def test_a_pair_serves_on_while_its_weights_are_read(whole: Pair) -> None:
    succeed(whole, "start")
    answer = succeed(whole, "weights", "verify", "--full")
    assert answer["hashed"] > 2 * 50_000_000
    assert succeed(whole, "status")["state"] == "running"
    succeed(whole, "stop")


# -- the hub moves on -------------------------------------------------------------------------------------------------


def test_the_lock_is_compared_with_a_hub_that_moved_on(unlocked: Pair) -> None:
    recipe = unlocked.head.run(["cat", f"{HOME}/recipes/lab/recipe.toml"]).stdout.decode()
    unlocked.write(f"{HOME}/recipes/moving/recipe.toml", recipe.replace(unlocked.commits[MODEL_NAME], "main"))
    unlocked.head.run(["cp", "-rn", f"{HOME}/recipes/lab/.", f"{HOME}/recipes/moving/"])
    unlocked.write_settings(SPARKSERVE_RECIPE=f"{HOME}/recipes/moving")
    succeed(unlocked, "lock")
    assert succeed(unlocked, "lock", "--check")["differences"] == []
    repo = ModelRepo(unlocked.lab.folder / "repos", MODEL_NAME)
    unlocked.hub.control(
        move_branch={"repo": MODEL_NAME, "branch": "main", "commit": repo.change("config.json", b"{}")}
    )
    answer = unlocked.ask("lock", "--check")
    changed = {row["source"]: row for row in answer["data"]["differences"]}
    assert answer["exit_code"] == 4
    assert set(changed) == {f"weights {MODEL_NAME}", "model/config.json"}
    assert changed[f"weights {MODEL_NAME}"]["before"] == unlocked.commits[MODEL_NAME]
    assert not succeed(unlocked, "lock", "--update", "--dry-run")["written"]
    assert succeed(unlocked, "lock", "--update")["differences"] == list(changed.values())
    assert succeed(unlocked, "lock", "--check")["differences"] == []
    unlocked.head.run(["sh", "-c", "rm -rf ~/recipes/moving ~/sparkserve.lock.json"])


@pytest.mark.parametrize(
    ("fault", "options", "code"),
    [
        ("status", {"status": 429, "match": {"path_regex": "/api/models"}}, "hub_limit"),
        ("mask_hash", {}, "hub_hash_hidden"),
        ("cut_listing", {"match": {"path_regex": "tree"}}, ""),
    ],
)
def test_a_listing_that_cannot_be_trusted(unlocked: Pair, fault: str, options: dict[str, Any], code: str) -> None:
    unlocked.hub.fault(fault, **options)
    answer = unlocked.ask("lock")
    assert {error["code"] for error in answer["errors"]} == ({code} if code else set())
    assert (answer["exit_code"] == 0) == (not code)
    unlocked.hub.reset()
    succeed(unlocked, "lock")


def test_verify_and_prune_need_a_lock_and_no_network(whole: Pair) -> None:
    whole.write_settings(HF_ENDPOINT="http://nosuch.invalid")
    assert findings(whole) == (0, set())
    assert succeed(whole, "prune", "--dry-run")["applied"] == []
    whole.head.run(["mv", "sparkserve.lock.json", "kept.json"])
    answer = whole.ask("weights", "verify")
    assert (answer["exit_code"], answer["errors"][0]["code"]) == (2, "lock_missing")


# -- the worker goes away ---------------------------------------------------------------------------------------------


@contextmanager
def slow_download(pair: Pair) -> Iterator[subprocess.Popen[bytes]]:
    for node in pair.lab.nodes:
        node.run(["rm", "-rf", MODELS])
    pair.write_settings(SPARKSERVE_RATE_LIMIT="12MB")
    with pair.head.popen(pair.command("download", "--json"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 60
        while not list((pair.worker.root / MODELS[1:]).rglob("*.safetensors")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield run
    pair.write_settings()


def test_a_worker_that_is_silent_for_ten_seconds(whole: Pair) -> None:
    with slow_download(whole) as run:
        whole.worker.pause_sshd()
        threading.Timer(10, whole.worker.resume_sshd).start()
        answer = json.loads(run.communicate(timeout=180)[0])
    assert answer["exit_code"] == 0, answer["errors"]
    assert findings(whole) == (0, set())


def test_a_cable_that_is_dead_for_a_while(whole: Pair) -> None:
    interface = whole.worker.link_interface
    total = sum(file["size"] for manifest in lock_of(whole)["weights"] for file in manifest["files"])

    def iptables(action: str) -> None:
        whole.worker.run(["iptables", action, "INPUT", "-i", interface, "-j", "DROP"], user="root")

    def received() -> int:
        return int(whole.worker.run(["cat", f"/sys/class/net/{interface}/statistics/rx_bytes"]).stdout)

    before = received()
    with slow_download(whole) as run:
        iptables("-A")
        repair = threading.Timer(45, iptables, ["-D"])
        repair.start()
        answer = json.loads(run.communicate(timeout=180)[0])
        repair.join()
    assert answer["exit_code"] == 0, answer["errors"]
    # All of it came over the cable, and what had arrived was not sent again.
    assert 0.9 * total < received() - before < 1.25 * total
    assert findings(whole, "--full") == (0, set())


def test_a_worker_that_stays_away(whole: Pair) -> None:
    with slow_download(whole) as run:
        begun = time.monotonic()
        whole.worker.stop_sshd()
        answer = json.loads(run.communicate(timeout=180)[0])
        seconds = time.monotonic() - begun
    whole.worker.start_sshd()
    assert {error["node"] for error in answer["errors"]} == {"worker"}, answer["errors"]
    assert (answer["exit_code"], seconds < 60) == (6, True), answer["errors"]
    whole.hub.state.log.clear()
    succeed(whole, "download")
    assert findings(whole) == (0, set())


def test_two_downloads_at_once(whole: Pair) -> None:
    with slow_download(whole) as run:
        whole.hub.control(rate=100_000)  # the first cannot end before the second was answered
        second = whole.ask("download")
        whole.hub.control(rate=None)
        assert (second["exit_code"], second["errors"][0]["code"]) == (3, "locked")
        assert "sparkserve download" in second["errors"][0]["message"]
        assert json.loads(run.communicate(timeout=180)[0])["exit_code"] == 0
    assert findings(whole) == (0, set())


def test_stale_partials_of_another_file_are_not_taken_for_it(whole: Pair) -> None:
    for node in whole.lab.nodes:
        steps = ["rm {0}", "mkdir -p .sparkserve-partial", "head -c 700000 /dev/urandom > .sparkserve-partial/{0}"]
        node.run(["sh", "-ec", "; ".join([f"cd {folder_of(whole)}", *steps]).format(SHARD)])
    succeed(whole, "download")
    assert findings(whole, "--full") == (0, set())


# -- prune ------------------------------------------------------------------------------------------------------------


def test_prune_removes_what_is_ours_and_not_wanted(whole: Pair) -> None:
    repo = ModelRepo(whole.lab.folder / "repos", MODEL_NAME)
    later = repo.change("config.json", b'{"newer": true}')
    recipe = whole.head.run(["cat", f"{HOME}/recipes/lab/recipe.toml"]).stdout.decode()
    whole.head.run(["cp", "-r", f"{HOME}/recipes/lab", f"{HOME}/recipes/later"])
    whole.write(f"{HOME}/recipes/later/recipe.toml", recipe.replace(whole.commits[MODEL_NAME], later))
    before = folder_of(whole)
    cache = f"{HOME}/sparkserve/cache/ranks/0123456789ab"
    for node in whole.lab.nodes:
        node.run(["mkdir", "-p", cache], user="root")
        node.run(["sh", "-c", f"head -c 3000000 /dev/zero > {cache}/rank0of2.bin"], user="root")
    whole.head.run(["cp", "sparkserve.lock.json", "kept.json"])
    whole.write_settings(SPARKSERVE_RECIPE=f"{HOME}/recipes/later")
    succeed(whole, "lock", "--update")
    succeed(whole, "download", "--adopt", MODELS)  # all but one file are the same
    asked = whole.ask("prune")
    assert (asked["exit_code"], asked["errors"][0]["code"]) == (2, "needs_yes")
    preview = {(row["node"], row["resource"]): row for row in succeed(whole, "prune", "--dry-run")["changes"]}
    for role in ("head", "worker"):
        assert preview[role, cache]["size"] >= 3_000_000
        assert 0 < preview[role, before]["size"] < 1_000
    succeed(whole, "prune", "--yes")
    for node in whole.lab.nodes:
        assert not (node.root / cache[1:]).exists()
        assert not (node.root / f"{before}/config.json"[1:]).exists()
        assert (node.root / f"{before}/{SHARD}"[1:]).exists()
    assert findings(whole) == (0, set())
    assert whole.sparkserve("prune").stdout.decode().strip() == "nothing to remove"
    whole.head.run(["rm", "-rf", f"{HOME}/recipes/later"])
