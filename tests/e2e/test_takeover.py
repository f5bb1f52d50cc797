"""A pair that a script of the owner's started: written down while it serves, then started by us with nothing copied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab.node import LabNode
from tests.lab.pair import HOME, Pair
from tests.lab.theirs import CACHE, NAMES, SECRET, fetched_by_hand, served, theirs_down, theirs_up

pytestmark = pytest.mark.faults


def essence(node: LabNode, name: str) -> dict[str, Any]:
    """Give what the engine is given: its image, words, environment, files, devices, limits."""
    box = json.loads(node.docker("inspect", name))[0]
    host = box["HostConfig"]
    return {
        "image": box["Image"],
        "argv": [box["Path"], *box["Args"]],
        "env": sorted(box["Config"]["Env"]),
        "mounts": sorted((item["Source"], item["Destination"], item["RW"]) for item in box["Mounts"]),
        "devices": [item["PathOnHost"] for item in host["Devices"]],
        "limits": host["Ulimits"],
        "added": [name.removeprefix("CAP_") for name in host["CapAdd"]],
        "ipc": (host["IpcMode"], host["ShmSize"]),
    }


def listing(node: LabNode) -> bytes:
    """List their files with owner, size and times: nothing of theirs may change."""
    return node.run(["sh", "-c", f"find {CACHE} -ls | sort"], user="root").stdout


@pytest.fixture
def fetched(pair: Pair) -> Iterator[Pair]:
    """Their image and their weights on both nodes; of ours there is nothing."""
    with fetched_by_hand(pair):
        yield pair


@pytest.fixture
def theirs(fetched: Pair) -> Pair:
    """A pair of theirs that serves."""
    theirs_up(fetched)
    return fetched


def test_a_pair_of_theirs_becomes_ours_with_nothing_copied(theirs: Pair) -> None:
    before = [essence(node, name) for node, name in zip(theirs.lab.nodes, NAMES, strict=True)]
    files = [listing(node) for node in theirs.lab.nodes]
    theirs.hub.state.log.clear()
    worker = f"spark@{theirs.worker.management_address}"
    check_up(theirs, worker)
    assert [essence(node, name) for node, name in zip(theirs.lab.nodes, NAMES, strict=True)] == before
    answers = [theirs.sparkserve("init", worker, "--from-running", "--yes")]
    assert answers[0].returncode == 0, answers[0].stderr.decode()
    verdict = answers[0].stdout.decode().rpartition("doctor: ")[2]
    assert "fail" in verdict, "the ports are theirs as yet"

    answers.append(theirs.sparkserve("plan", "--against-running", "--json"))
    compared = json.loads(answers[1].stdout)
    assert (compared["exit_code"], compared["data"]["unexplained"]) == (0, 0), compared
    assert {row["name"] for row in compared["data"]["differences"]} >= {"restart_policy", "init"}
    assert served(theirs) == ["their-model"], "looking must not disturb them"

    refused = theirs.ask("start")
    assert refused["exit_code"] == 3
    told = [(error["node"], error["message"], error["hint"]) for error in refused["errors"]]
    assert {node for node, message, hint in told if "runs rank" in message and "docker stop tf-" in hint} == {
        "head", "worker",
    }  # fmt: skip

    theirs_down(theirs)
    started = theirs.ask("start")
    assert started["exit_code"] == 0, started["errors"]
    after = [essence(node, f"sparkserve-rank{rank}") for rank, node in enumerate(theirs.lab.nodes)]
    assert after == before
    assert theirs.hub.log() == [], "nothing is fetched"
    for node in theirs.lab.nodes:
        ours = node.run(["find", f"{HOME}/sparkserve", "-type", "f", "-size", "+1k"], check=False).stdout
        assert ours == b"", "nothing is copied"
    answers.append(theirs.sparkserve("plan"))
    assert theirs.ask("plan", "--against-running")["data"]["differences"] == []
    assert theirs.ask("verify")["exit_code"] == 0
    assert theirs.sparkserve("start").stdout.strip() == b"No changes"

    assert theirs.ask("stop")["exit_code"] == 0
    nothing = theirs.ask("plan", "--against-running")["errors"][0]
    assert (nothing["code"], nothing["hint"]) == ("takeover_none", "sparkserve start")
    assert [listing(node) for node in theirs.lab.nodes] == files
    theirs_up(theirs)
    assert [essence(node, name) for node, name in zip(theirs.lab.nodes, NAMES, strict=True)] == before
    check_secret(theirs, [answer.stdout + answer.stderr for answer in answers])
    check_half(theirs, worker)


def check_up(pair: Pair, worker: str) -> None:
    """Look at both nodes without any settings: both ranks are named, and nothing is measured beside them."""
    found = pair.ask("doctor", worker, "--link")
    ranks = [check for check in found["data"]["checks"] if "runs rank" in check["observed"]]
    assert [(check["id"], check["node"], check["verdict"]) for check in ranks] == [
        ("containers", "head", "fail"),
        ("containers", "worker", "fail"),
    ]
    assert all("`sparkserve init --from-running`" in check["hint"] for check in ranks)
    (left_out,) = [check for check in found["data"]["checks"] if check["id"] == "link_bandwidth"]
    assert (left_out["verdict"], "tf-head, tf-worker may use the cable" in left_out["observed"]) == ("unseen", True)
    assert served(pair) == ["their-model"]
    assert pair.head.run(["ls", ".env", "sparkserve"], check=False).stdout == b""


def check_half(pair: Pair, worker: str) -> None:
    """With the worker's rank stopped, see what is there told by name and what is missing, and nothing written."""
    pair.worker.docker("stop", "-t", "1", NAMES[1])
    listed = ["sh", "-c", "ls -l --full-time .env recipe sparkserve.lock.json taken-over.*; ls -d nowhere"]
    before = pair.head.run(listed, check=False).stdout
    refused = pair.ask("init", worker, "--from-running", "--yes", "--force", "--recipe-dir", "nowhere")
    missing = "rank 1 is missing on the worker: start your own script there, too"
    told = [(error["code"], error["message"], error["hint"]) for error in refused["errors"]]
    assert told == [("takeover_half", "only half of a pair runs: tf-head (rank 0 of tensorfold) on the head", missing)]
    compared = pair.ask("plan", "--against-running")
    assert [(error["code"], error["hint"]) for error in compared["errors"]] == [("takeover_half", missing)]
    found = pair.ask("doctor")["data"]["checks"]
    (rank,) = [check for check in found if "runs rank" in check["observed"]]
    assert (rank["node"], rank["verdict"], missing in rank["hint"]) == ("head", "fail", True), rank
    assert pair.head.run(listed, check=False).stdout == before


def test_an_engine_beside_a_sleeping_main_process(fetched: Pair) -> None:
    theirs_up(fetched, beside=True)
    worker = f"spark@{fetched.worker.management_address}"
    before = listing(fetched.head)
    images = [node.docker("images", "--format", "{{.Repository}}:{{.Tag}}") for node in fetched.lab.nodes]
    planned = fetched.sparkserve("init", worker, "--from-running", "--yes", "--dry-run")
    assert planned.returncode == 0, planned.stderr.decode()
    for text in ("# Written by `sparkserve init --from-running`", "SPARKSERVE_RECIPE=", "taken-over.secrets"):
        assert text in planned.stdout.decode()
    assert listing(fetched.head) == before
    assert images == [node.docker("images", "--format", "{{.Repository}}:{{.Tag}}") for node in fetched.lab.nodes]
    with no_tags(fetched.worker):
        assert fetched.ask("init", worker, "--from-running", "--yes")["errors"][0]["node"] == "worker"
    left = fetched.head.run(["sh", "-c", "ls -d .env recipe taken-over.* sparkserve.lock.json"], check=False).stdout
    assert left == b"", "no --force is needed to try again"
    begun = fetched.sparkserve("init", worker, "--from-running", "--yes")
    assert begun.returncode == 0, begun.stderr.decode()
    compared = fetched.ask("plan", "--against-running")
    assert (compared["exit_code"], compared["data"]["unexplained"]) == (0, 0), compared
    theirs_down(fetched)
    started = fetched.ask("start")
    assert started["exit_code"] == 0, started["errors"]
    found = essence(fetched.worker, "sparkserve-rank1")
    assert found["argv"][:4] == ["python3", "-m", "tensorfold", "serve"]
    assert {"MORE=1", f"HF_TOKEN={SECRET}", f"NCCL_SOCKET_IFNAME={fetched.worker.link_interface}"} <= set(found["env"])
    assert fetched.ask("plan", "--against-running")["data"]["differences"] == []
    check_secret(fetched, [one.stdout + one.stderr for one in (planned, begun)])


@contextmanager
def no_tags(node: LabNode) -> Iterator[None]:
    """Let the node's Docker command name no image."""
    script = '#!/bin/sh\n[ "$1" != tag ] || { echo no room >&2; exit 1; }\nexec /usr/bin/docker "$@"\n'
    write = ["sh", "-c", "cat > /usr/local/bin/docker && chmod 755 /usr/local/bin/docker"]
    node.run(write, stdin=script.encode(), user="root")
    yield
    node.run(["rm", "/usr/local/bin/docker"], user="root")


def check_secret(pair: Pair, outputs: list[bytes]) -> None:
    """Prove that their token is in one file that only the owner can read, and was shown nowhere."""
    for text in (*outputs, pair.head.run(["sh", "-c", "cat .env recipe/* sparkserve.lock.json"]).stdout):
        assert SECRET.encode() not in text
    kept = pair.head.run(["sh", "-c", "stat -c '%a %U' taken-over.secrets && cat taken-over.secrets"]).stdout.decode()
    assert kept.splitlines() == ["600 spark", f"HF_TOKEN={SECRET}"]
    state = pair.head.run(["grep", "-rl", SECRET, ".local/state"], check=False).stdout
    assert state == b"", "run records name the secret only"


def test_nothing_runs_or_settings_would_change_it(pair: Pair) -> None:
    pair.write_settings(SPARKSERVE_CONTEXT="4096")
    refused = pair.ask("init", "--from-running", "--yes", "--force")
    assert (refused["exit_code"], refused["errors"][0]["code"]) == (2, "takeover_settings")
    pair.write_settings()
    assert pair.ask("plan", "--against-running")["errors"][0]["code"] == "lock_missing"
    refused = pair.ask("init", "--from-running", "--yes", "--force", "--recipe-dir", "nowhere")
    assert (refused["exit_code"], refused["errors"][0]["code"]) == (3, "takeover_none")
    pair.head.run(["rm", ".env"])
    worker = f"spark@{pair.worker.management_address}"
    refused = pair.ask("init", worker, "--from-running", "--yes", "--recipe-dir", "nowhere")
    assert refused["errors"][0]["code"] == "takeover_none", "no --force is needed"
    assert pair.head.run(["ls", "nowhere", ".env"], check=False).stdout == b""
    pair.write_settings()
