"""A pair that a script of the owner's started: written down while it serves, then started by us with nothing copied."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.lab.model_repo import ENGRAM_NAME, MODEL_NAME
from tests.lab.node import LabNode
from tests.lab.pair import ENGINE, HOME, SOURCE, TOKEN, Pair
from tests.lab.recipe import TEMPLATE

pytestmark = pytest.mark.faults
IMAGE = "theirs/engine:latest"
CACHE = f"{HOME}/.cache/huggingface"
SECRET = "hf_of-their-own-account-0123456789"
NAMES = ("tf-head", "tf-worker")
DOCKERFILE = """FROM {base}
COPY . /opt/engine
RUN ln -s tensorfold_lab /opt/engine/tensorfold
ENV PYTHONPATH=/opt/engine
ENTRYPOINT ["/opt/engine/bin/tensorfold"]
"""
SLEEPER = ("-c", "trap 'exit 0' TERM; sleep infinity & wait")


def build_image(pair: Pair) -> None:
    """Build the engine on the head, and carry it to the worker as its owner would."""
    text = DOCKERFILE.format(base=pair.lab.registry_reference)
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(ENGINE, ".", filter=lambda item: None if "__pycache__" in item.name else item)
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text.encode()))
    pair.head.run(["docker", "build", "-q", "-t", IMAGE, "-"], stdin=context.getvalue(), timeout=120)
    pair.worker.run(["docker", "load"], stdin=pair.head.run(["docker", "save", IMAGE]).stdout, timeout=120)


def fetch_weights(pair: Pair, node: LabNode) -> None:
    """Fill a cache of the hub's own client; its files become root's, as containers leave them."""
    environment = {"HOME": HOME, "HF_ENDPOINT": pair.hub.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_TELEMETRY": "1"}
    for name in (MODEL_NAME, ENGRAM_NAME):
        words = [str(SOURCE / ".venv/bin/hf"), "download", name, "--revision", pair.commits[name]]
        node.run(words, env=environment, timeout=120)
    # The engine wants a template beside the weights; theirs put it there by hand.
    place = snapshot(pair, MODEL_NAME).replace("/hf", CACHE, 1)
    node.run(["tee", f"{place}/chat_template.jinja"], stdin=TEMPLATE.read_bytes())
    node.run(["chown", "-R", "root:root", CACHE], user="root")
    node.run(["mkdir", "-p", f"{HOME}/tf-cache"])


def snapshot(pair: Pair, name: str) -> str:
    return f"/hf/hub/models--{name.replace('/', '--')}/snapshots/{pair.commits[name]}"


def theirs_up(pair: Pair, *, beside: bool = False) -> None:
    """Do what their script does: the worker first, then the head, by `docker run`, or by `docker exec` in a sleeper."""
    for rank, node in ((1, pair.worker), (0, pair.head)):
        options = [
            "--name",
            NAMES[rank],
            "--gpus",
            "all",
            "--network",
            "host",
            "--shm-size",
            "1g",
            "--restart",
            "always",
        ]
        options += ["--device", "/dev/infiniband", "--cap-add", "IPC_LOCK", "--ulimit", "memlock=-1"]
        options += ["-v", f"{CACHE}:/hf:ro", "-v", f"{HOME}/tf-cache:/cache/ranks", "-v", "/var/lib/lab:/lab"]
        env = {
            "TF_DS_ENGRAM": snapshot(pair, ENGRAM_NAME),
            "TF_DS_RANK_CACHE": "/cache/ranks",
            "NCCL_SOCKET_IFNAME": node.link_interface,
            "GLOO_SOCKET_IFNAME": node.link_interface,
            "HF_TOKEN": SECRET,
        }
        options += [word for name, value in env.items() for word in ("-e", f"{name}={value}")]
        argv = ["serve", snapshot(pair, MODEL_NAME), "--tp", "2", "--rank", str(rank), "--context", "65536"]
        argv += ["--master", pair.head.link_address, "--master-port", "29600", "--parallel", "2", "--no-update-check"]
        argv += ["--host", "127.0.0.1", "--port", "8765", "--name", "their-model"] if rank == 0 else []
        if beside:
            node.docker("run", "-d", "--entrypoint", "bash", *options, IMAGE, *SLEEPER)
            node.docker(
                "exec", "-d", "-e", "MORE=1", NAMES[rank], "sh", "-c", f"exec python3 -m tensorfold {' '.join(argv)}"
            )
        else:
            node.docker("run", "-d", *options, IMAGE, *argv)
    deadline = time.monotonic() + 60
    while served(pair) != ["their-model"]:
        assert time.monotonic() < deadline, pair.head.docker("logs", NAMES[0])
        time.sleep(0.2)


def theirs_down(pair: Pair) -> None:
    for rank, node in ((0, pair.head), (1, pair.worker)):
        node.docker("stop", "-t", "1", NAMES[rank])
        node.docker("rm", NAMES[rank])
        # The kernel takes back what a killed engine held; the stand-in's memory is a file.
        node.set_meminfo(MemAvailable=119_000_000, MemFree=118_000_000)


def served(pair: Pair) -> list[str]:
    answer = pair.head.run(["curl", "-sf", "http://127.0.0.1:8765/v1/models"], check=False).stdout
    return [item["id"] for item in json.loads(answer)["data"]] if answer else []


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


def clean(pair: Pair) -> None:
    """Leave nothing of theirs, and nothing of ours that came of it."""
    pair.reset()
    for node in pair.lab.nodes:
        node.run(["sh", "-c", f"cd {HOME} && rm -rf {CACHE} tf-cache recipe taken-over.* .env"], user="root")
        images = node.docker("images", "-q", "--filter", "reference=theirs/*", "--filter", "reference=*/their-model")
        if images:
            node.docker("rmi", "-f", *images.split())
    pair.forget_everything()


@pytest.fixture
def fetched(pair: Pair) -> Iterator[Pair]:
    """Their image and their weights on both nodes; of ours there is nothing, not even a settings file."""
    clean(pair)
    try:
        build_image(pair)
        for node in pair.lab.nodes:
            fetch_weights(pair, node)
        yield pair
    finally:
        clean(pair)
        pair.write_settings()


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


def test_an_engine_beside_a_sleeping_main_process(fetched: Pair) -> None:
    theirs_up(fetched, beside=True)
    worker = f"spark@{fetched.worker.management_address}"
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
    check_secret(fetched, [begun.stdout + begun.stderr])


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
