"""The lab as the weights bench needs it: a hub process of its own, sets of files, and an owner who types commands."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sparkserve.lock import NAME, Lock, LockedImage
from sparkserve.manifest import Manifest, ManifestFile
from tests.lab.model_repo import make_bench_repo
from tests.lab.node import LabNode
from tests.lab.nodes import Lab
from tests.lab.repo_store import ModelRepo

SOURCE = Path(__file__).parents[2]
HOME = "/home/spark"
BIN = SOURCE / ".venv" / "bin"
IMAGE = f"lab.invalid/engine@sha256:{'0' * 64}"
RECIPE = """
schema = 1
name = "bench"
title = "Files of one size or another"
engine = "none"
weights = [{{ name = "model", repository = "{repository}", revision = "main", mount = "/weights" }}]
[parameters]
model_name = "bench"
context = 1024
[ports]
api = 8888
master = 8889
[image]
reference = "{image}"
entrypoint = ["true"]
architecture = "any"
expected_bytes = 0
[launch]
argv = []
[memory]
required_gib = 1
"""
# Runs a command and tells the most memory that one of its processes took, in KiB, as the last line of stderr.
MEASURED = """
import resource, subprocess, sys
code = subprocess.run(sys.argv[1:]).returncode
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(code)
"""


@dataclass
class FileSet:
    """A repository of the hub, and the owner's directory with settings and lock for it."""

    repo: ModelRepo
    directory: str

    @property
    def size(self) -> int:
        """All bytes."""
        return sum(entry.size for entry in self.entries)

    @property
    def entries(self) -> list[Any]:
        """All files."""
        return list(self.repo.entries(self.repo.head).values())

    @property
    def models(self) -> str:
        """The models directory, on both nodes."""
        return f"{self.directory}/models"

    @property
    def files(self) -> str:
        """Where the files are, on both nodes."""
        return f"{self.models}/{self.repo.name}/{self.repo.head}"


@dataclass
class Bench:
    """Both nodes, and the hub that runs beside them."""

    lab: Lab
    folder: Path
    endpoint: str
    peak_kib: list[int] = field(default_factory=list)

    def make_set(self, name: str, sizes: Sequence[int]) -> FileSet:
        """Make a repository, and an owner's directory with settings, recipe and lock."""
        made = FileSet(make_bench_repo(self.folder, sizes, name=f"bench/{name}"), f"{HOME}/{name}")
        manifest = Manifest(
            name="model",
            repository=made.repo.name,
            commit=made.repo.head,
            files=tuple(ManifestFile(path=e.path, size=e.size, sha256=e.sha256, git_sha1=None) for e in made.entries),
        )
        lock = Lock(schema=1, recipe="bench", weights=(manifest,), image=LockedImage(reference=IMAGE))
        settings = {
            "SPARKSERVE_WORKER": f"spark@{self.lab.worker.management_address}",
            "SPARKSERVE_HEAD_LINK": self.lab.head.link_address,
            "SPARKSERVE_WORKER_LINK": self.lab.worker.link_address,
            "SPARKSERVE_RECIPE": f"{made.directory}/recipe",
            "SPARKSERVE_MODELS_DIR": made.models,
            "HF_ENDPOINT": self.endpoint,
        }
        self.write(f"{made.directory}/.env", "".join(f"{key}={value}\n" for key, value in settings.items()))
        text = RECIPE.format(repository=made.repo.name, image=IMAGE)
        self.write(f"{made.directory}/recipe/recipe.toml", text)
        self.write(f"{made.directory}/{NAME}", json.dumps(lock.model_dump(by_alias=True, exclude_none=True)))
        return made

    def write(self, path: str, text: str) -> None:
        """Write a file of the owner on the head."""
        script = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        self.lab.head.run(["sh", "-c", script, "sh", path], stdin=text.encode())

    def fill(self, node: LabNode, files: FileSet, directory: str) -> None:
        """Put the files of a set on a node by hand, as its owner's."""
        node.run(["mkdir", "-p", directory])
        for entry in files.entries:
            path = node.root / f"{directory}/{entry.path}".lstrip("/")
            shutil.copyfile(files.repo.blob(entry), path)
            os.chown(path, node.uid, node.uid)

    def warm(self, node: LabNode, directory: str) -> None:
        """Read files once, so that nobody waits for the disk, and let the disk come to rest."""
        node.run(["sh", "-c", f"sync; cat {directory}/*.bin > /dev/null"], timeout=300)

    def measured(self, *argv: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command of ours on the head, and note the memory that it took."""
        done = self.lab.head.run(["python3", "-c", MEASURED, *argv], timeout=600, check=False)
        self.peak_kib.append(int(done.stderr.splitlines()[-1]))
        return done

    def sparkserve(self, files: FileSet, *words: str, code: int = 0) -> dict[str, Any]:
        """Run a command in the directory of a set, which must end with that code; give its JSON object."""
        program = str(BIN / "sparkserve")
        done = self.measured("sh", "-c", f'cd {files.directory} && exec "$@"', "sh", program, *words, "--json")
        if done.returncode != code:
            raise RuntimeError(f"sparkserve {' '.join(words)}: {done.stdout.decode()} {done.stderr.decode()}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def head_only(self, files: FileSet) -> list[str]:
        """Give the argv of the download step alone: the owner's own command would go on to the worker."""
        program = [str(BIN / "python"), "-m", "tests.bench.head_download", files.directory]
        return ["env", f"PYTHONPATH={SOURCE}", *program]

    def control(self, **order: object) -> None:
        """Script the hub."""
        httpx.post(f"{self._hub}/control", json=order).raise_for_status()

    def log(self) -> list[dict[str, Any]]:
        """Give what the hub served, once it is idle."""
        while True:
            entries: list[dict[str, Any]] = httpx.get(f"{self._hub}/log").json()["requests"]
            content = [entry for entry in entries if entry["host"] == "content"]
            if all(entry["done"] for entry in content):
                return content
            time.sleep(0.02)

    def forget(self) -> None:
        """Begin the hub's log anew; settings and faults go too."""
        httpx.post(f"{self._hub}/reset").raise_for_status()

    @property
    def _hub(self) -> str:
        port = self.endpoint.rpartition(":")[2]
        return f"http://{self.lab.gateway_address}:{port}/_lab"


@contextmanager
def bench_lab() -> Iterator[Bench]:
    """Bring up the lab and a hub; in the end nothing of their gigabytes is left."""
    # An installed package has its bytecode; the nodes' owner cannot write it into the checkout.
    compileall.compile_dir(SOURCE / "sparkserve", quiet=1)
    lab = Lab.for_checkout(SOURCE)
    folder = lab.folder / "bench-repos"
    with ExitStack() as stack:
        stack.enter_context(lab.session())
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-m", "tests.lab.hub", "--bind", lab.gateway_address, "--repos", str(folder)]
        hub = stack.enter_context(subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=SOURCE))
        stack.callback(hub.terminate)
        assert hub.stdout is not None
        endpoint = json.loads(hub.stdout.readline())["endpoint"]
        for name in ("hub.lab", "cdn.lab"):
            lab.add_host(name, lab.gateway_address)
        lab.trust_worker()
        for node in lab.nodes:
            words = ["sh", "-c", "rm -rf ~/line ~/large ~/many ~/kill ~/theirs ~/script"]
            stack.callback(node.run, words, timeout=300, check=False)
        yield Bench(lab, folder, endpoint)
