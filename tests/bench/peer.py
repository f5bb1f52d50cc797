"""sparkrun beside us on the lab: the same image and server on both nodes, from the command until it answers."""

from __future__ import annotations

import shutil
import stat
import subprocess
import time
from pathlib import Path

from tests.lab.node import LabNode
from tests.lab.pair import HOME, SOURCE, Pair

RELEASE = "sparkrun==0.4.2"
PLACE = SOURCE / ".bench" / "sparkrun"
PYTHON_COPY = PLACE.with_name("python")
IMAGE = "lab/trivial:1"
COMMIT = "a" * 40
CACHE = ".cache/huggingface/hub/models--lab--tiny"
SERVER = Path(__file__).with_name("trivial_server.py")
# What sparkrun asks of an image beside the server.
DOCKERFILE = r"""FROM {base}
RUN printf '#!/bin/sh\nkill "$@"\n' > /usr/bin/kill && chmod 755 /usr/bin/kill
"""
THEIR_RECIPE = f"""recipe_version: "2"
model: lab/tiny
model_revision: {COMMIT}
runtime: vllm-distributed
container: {IMAGE}
min_nodes: 2
max_nodes: 2
defaults: {{port: 8000, host: 0.0.0.0, tensor_parallel: 2, served_model_name: tiny}}
command: |
  python3 /cache/huggingface/hub/models--lab--tiny/snapshots/{COMMIT}/server.py --port {{port}} --model {{model}}
"""
OUR_RECIPE = """schema = 1
name = "trivial"
title = "A server that is up at once"
engine = "none"
weights = []
[parameters]
model_name = "tiny"
context = 1024
[ports]
api = 8000
master = 29501
[image]
reference = "{image}"
entrypoint = ["python3"]
architecture = "any"
[container]
devices = []
capabilities = []
mounts = [{{ source = "{snapshot}", target = "/model", writable = false, must_exist = true }}]
[launch]
argv = [
  "/model/server.py", "--port", "${{ports.api}}", "--master-port", "${{ports.master}}", "--node-rank", "${{rank}}",
]
[memory]
required_gib = 1
"""


def install() -> str:
    """Install sparkrun in a Python of its own; say why where that cannot be had, nothing where it is there."""
    python = _find_python()
    if python is None:
        return "sparkrun 0.4.2 needs Python 3.12, which is not on this machine"
    if not (PLACE / "bin" / "sparkrun").exists():
        made = subprocess.run([_open_to_all(python), "-m", "venv", "--clear", str(PLACE)], check=False)
        pip = [str(PLACE / "bin" / "pip"), "install", "--quiet", RELEASE]
        if made.returncode or subprocess.run(pip, check=False, timeout=600).returncode:
            shutil.rmtree(PLACE, ignore_errors=True)
            return f"{RELEASE} cannot be installed here"
    return ""


def _find_python() -> str | None:
    """Find a Python that is new enough: on PATH, or one that pyenv keeps."""
    named = [shutil.which(f"python3.{minor}") for minor in range(12, 20)]
    kept = sorted(str(path) for path in Path.home().glob(".pyenv/versions/3.1[2-9].*/bin/python"))
    for path in filter(None, [*named, *kept]):
        new_enough = [path, "-c", "import sys; sys.exit(sys.version_info < (3, 12))"]
        if subprocess.run(new_enough, check=False, capture_output=True).returncode == 0:
            return path
    return None


def _open_to_all(python: str) -> str:
    """Give this Python, or a copy of it where only its owner may enter its directory: the lab's account runs it."""
    if all(folder.stat().st_mode & stat.S_IXOTH for folder in Path(python).resolve().parents):
        return python
    prefix = subprocess.check_output([python, "-c", "import sys; print(sys.base_prefix)"], text=True).strip()
    shutil.rmtree(PYTHON_COPY, ignore_errors=True)
    shutil.copytree(prefix, PYTHON_COPY, symlinks=True)
    return str(PYTHON_COPY / "bin" / "python3")


def prepare(pair: Pair) -> None:
    """Put image, server, recipes and keys in place, so that either launcher only has to launch."""
    head, worker = pair.lab.nodes
    dockerfile = DOCKERFILE.format(base=pair.lab.registry_reference)
    head.run(["docker", "build", "-t", IMAGE, "-"], stdin=dockerfile.encode(), timeout=300)
    worker.run(["docker", "load"], stdin=head.run(["docker", "save", IMAGE], timeout=300).stdout, timeout=300)
    snapshot = f"{HOME}/{CACHE}/snapshots/{COMMIT}"
    lines = (
        f"mkdir -p {snapshot} ~/{CACHE}/refs; printf {COMMIT} > ~/{CACHE}/refs/main; cd {snapshot}; cat > server.py",
        """echo '{"model_type": "llama"}' > config.json; echo > model.safetensors""",
    )
    for node in pair.lab.nodes:
        node.run(["sh", "-ec", "; ".join(lines)], stdin=SERVER.read_bytes())
    # Its head is one more host to it.
    head.run(["sh", "-ec", "cat ~/.ssh/id_ed25519.pub >> ~/.ssh/authorized_keys"])
    for host in _hosts(pair):
        head.run(["ssh", "-o", "StrictHostKeyChecking=accept-new", host, "true"])
    pair.write(f"{HOME}/tiny.yaml", THEIR_RECIPE)
    image = head.docker("images", "--no-trunc", "-q", IMAGE).strip()
    pair.write(f"{HOME}/recipes/trivial/recipe.toml", OUR_RECIPE.format(image=image, snapshot=snapshot))
    pair.write_settings(SPARKSERVE_RECIPE=f"{HOME}/recipes/trivial")
    for step in (["lock", "--update"], ["build"]):
        _succeed(pair, *step)


def _hosts(pair: Pair) -> list[str]:
    return [node.management_address for node in pair.lab.nodes]


def _succeed(pair: Pair, *words: str) -> None:
    answer = pair.ask(*words)
    if answer["exit_code"] != 0:
        raise RuntimeError(f"sparkserve {' '.join(words)}: {answer['errors']}")


def time_ours(pair: Pair) -> float:
    """Start, and stop outside of the time."""
    begun = time.perf_counter()
    _succeed(pair, "start")
    seconds = time.perf_counter() - begun
    _succeed(pair, "stop")
    return seconds


def time_theirs(pair: Pair) -> float:
    """Run, with no network to look at, until it says that inference is ready; then remove its containers."""
    words = ["run", "tiny.yaml", "--hosts", ",".join(_hosts(pair)), "--tp", "2", "--offline", "--no-follow"]
    environment = {"HOME": HOME, "SPARKRUN_TELEMETRY": "0", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}
    environment["LD_LIBRARY_PATH"] = str(PYTHON_COPY / "lib")  # a copied Python still names its first library
    argv = ["sh", "-c", 'cd && exec "$@"', "sh", str(PLACE / "bin" / "sparkrun"), *words]
    begun = time.perf_counter()
    done = pair.head.run(argv, env=environment, timeout=300, check=False)
    seconds = time.perf_counter() - begun
    if done.returncode or b"Inference ready" not in done.stdout + done.stderr:
        raise RuntimeError(f"sparkrun: {done.stdout.decode()[-2000:]} {done.stderr.decode()[-2000:]}")
    for node in pair.lab.nodes:
        _remove_containers(node)
    return seconds


def _remove_containers(node: LabNode) -> None:
    left = node.docker("ps", "-aq", "--filter", "name=sparkrun_").split()
    if left:
        node.docker("rm", "-f", *left)
