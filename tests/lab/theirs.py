"""A pair that a script of the owner's started: its image, its weights in a hub cache that root owns, its two ranks."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.model_repo import ENGRAM_NAME, MODEL_NAME
from tests.lab.node import LabNode
from tests.lab.pair import ENGINE, HOME, SOURCE, TOKEN, Pair
from tests.lab.recipe import TEMPLATE

IMAGE = "theirs/engine:latest"
CACHE = f"{HOME}/.cache/huggingface"
SECRET = "hf_of-their-own-account-0123456789"
NAMES = ("tf-head", "tf-worker")
MODEL = "their-model"
URL = "http://127.0.0.1:8765"
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
        argv += ["--host", "127.0.0.1", "--port", URL.rpartition(":")[2], "--name", MODEL] if rank == 0 else []
        if beside:
            node.docker("run", "-d", "--entrypoint", "bash", *options, IMAGE, *SLEEPER)
            node.docker(
                "exec", "-d", "-e", "MORE=1", NAMES[rank], "sh", "-c", f"exec python3 -m tensorfold {' '.join(argv)}"
            )
        else:
            node.docker("run", "-d", *options, IMAGE, *argv)
    deadline = time.monotonic() + 60
    while served(pair) != [MODEL]:
        assert time.monotonic() < deadline, pair.head.docker("logs", NAMES[0])
        time.sleep(0.2)


def theirs_down(pair: Pair) -> None:
    for rank, node in ((0, pair.head), (1, pair.worker)):
        node.docker("stop", "-t", "1", NAMES[rank])
        node.docker("rm", NAMES[rank])
        # The kernel takes back what a killed engine held; the stand-in's memory is a file.
        node.set_meminfo(MemAvailable=119_000_000, MemFree=118_000_000)


def served(pair: Pair) -> list[str]:
    answer = pair.head.run(["curl", "-sf", f"{URL}/v1/models"], check=False).stdout
    return [item["id"] for item in json.loads(answer)["data"]] if answer else []


def clean(pair: Pair) -> None:
    """Leave nothing of theirs, and nothing of ours that came of it."""
    pair.reset()
    for node in pair.lab.nodes:
        node.run(["sh", "-c", f"cd {HOME} && rm -rf {CACHE} tf-cache recipe taken-over.* .env"], user="root")
        images = node.docker("images", "-q", "--filter", "reference=theirs/*", "--filter", "reference=*/their-model")
        if images:
            node.docker("rmi", "-f", *images.split())
    pair.forget_everything()


@contextmanager
def fetched_by_hand(pair: Pair) -> Iterator[None]:
    """Put their image and their weights on both nodes; of ours there is nothing, not even a settings file."""
    clean(pair)
    try:
        build_image(pair)
        for node in pair.lab.nodes:
            fetch_weights(pair, node)
        yield
    finally:
        clean(pair)
        pair.write_settings()
