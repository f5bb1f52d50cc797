"""What the tests of the weights rooms share: a hub with files of chosen sizes, and a pair of nodes on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sparkserve import weights
from sparkserve.cluster import ROLES, Cluster, Deployment, Node, Role
from sparkserve.download import download
from sparkserve.errors import SparkserveError
from sparkserve.hosts import LocalHost
from sparkserve.hub_file import Hub as HubClient
from sparkserve.inventory import Item
from sparkserve.lock import Lock, LockedImage
from sparkserve.manifest import Manifest, ManifestFile
from sparkserve.plan import ApplyReport, Cancelled, Change, Plan, Reporter, Work, apply
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings
from sparkserve.web import Limits
from tests.lab.hub import Hub
from tests.lab.repo_store import ModelRepo

Silent = Reporter
KIB = 1 << 10
SEGMENT = 64 * KIB
FILE = "file-00001.bin"
# Small pieces and little patience: every fault plays within a second.
QUICK = Limits(
    segment_bytes=SEGMENT, span_segments=2, read_seconds=0.4, least_bytes=KIB, tries=4, first_wait=0.02,
    longest_wait=0.1, longest_retry_after=2.0,
)  # fmt: skip


@dataclass
class Recorder(Work):
    """A `Work` that remembers what it was told, and cancels on demand."""

    notes: list[str] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)

    def progress(self, done: int, total: int) -> None:
        self.seen.append((done, total))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def check(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled


@contextmanager
def serving(repos: Path, token: str | None = None) -> Iterator[Hub]:
    """Serve a hub on loopback; its two sites differ by port, which makes them two hosts to a careful client."""
    with Hub(repos, hub_name="", content_name="", token=token) as hub:
        yield hub


def client(hub: Hub, limits: Limits = QUICK, **settings: Any) -> HubClient:
    """Give what a run of downloads shares."""
    return HubClient(Settings(hf_endpoint=hub.endpoint, **settings), limits)


def manifest_of(repo: ModelRepo, name: str = "model") -> Manifest:
    """List all files of a repository as a lock does."""
    files = tuple(
        ManifestFile(
            path=entry.path, size=entry.size, sha256=entry.sha256, git_sha1=None if entry.sha256 else entry.blob_id
        )
        for entry in repo.entries(repo.head).values()
    )
    return Manifest(name=name, repository=repo.name, commit=repo.head, files=files)


def wanted(repo: ModelRepo, path: str) -> Item:
    """Give one file of a repository as a download wants it."""
    manifest = manifest_of(repo)
    (file,) = [file for file in manifest.files if file.path == path]
    return Item(manifest, file)


RECIPE = Recipe.model_validate(
    {
        "schema": 1,
        "name": "stage",
        "title": "A recipe for tests of the weights",
        "engine": "none",
        "parameters": {"model_name": "m", "context": 1024},
        "ports": {"api": 8888, "master": 8889},
        "weights": [{"name": "model", "repository": "lab/bench", "revision": "main", "mount": "/weights"}],
        "image": {"reference": "", "entrypoint": ["true"], "expected_bytes": 0},
        "launch": {"argv": []},
        "memory": {"required_gib": 1},
    }
)  # fmt: skip


@dataclass
class Pair:
    """Two nodes on this machine with directories of their own, and what they should hold."""

    deployment: Deployment
    repo: ModelRepo

    @property
    def manifest(self) -> Manifest:
        return self.deployment.lock.weights[0]

    def node(self, role: Role) -> Node:
        return self.deployment.cluster.node(role)

    def path(self, role: Role, name: str) -> Path:
        """Where a file of the manifest belongs on a node."""
        return Path(self.node(role).models_dir) / self.manifest.directory / name

    def facts(self) -> dict[Role, weights.Facts]:
        return {role: weights.gather(self.node(role), self.deployment.lock) for role in ROLES}

    def changes(self) -> list[Change]:
        """Plan both weights steps from fresh facts."""
        return weights.plan(self.deployment, self.facts())

    def apply(self) -> ApplyReport:
        """Plan and carry out."""
        return apply(Plan(tuple(self.changes())), Silent())

    def verify(self, *, full: bool = False) -> weights.Verification:
        """Prove both nodes."""
        return weights.verify(self.deployment, lambda plan: apply(plan, Silent()), full=full)

    def fill(self, *roles: Role) -> None:
        """Put every right file there by hand, unproved."""
        for role in roles:
            for file in self.manifest.files:
                path = self.path(role, file.path)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(self.repo.source(file.path).read_bytes())

    def assert_whole(self) -> None:
        """Both nodes hold exactly the right bytes, as regular files."""
        for role in ROLES:
            for file in self.manifest.files:
                path = self.path(role, file.path)
                assert not path.is_symlink()
                assert path.read_bytes() == self.repo.source(file.path).read_bytes(), (role, file.path)


@contextmanager
def pair(repo: ModelRepo, endpoint: str, home: Path, worker_host: LocalHost | None = None) -> Iterator[Pair]:
    """Connect a pair whose worker is this machine too."""
    settings = Settings(
        worker="lab-worker",
        models_dir=home / "head",
        worker_models_dir=home / "worker",
        hf_endpoint=endpoint,
        worker_link="10.9.8.7",
    )
    lock = Lock(schema=1, recipe="stage", weights=(manifest_of(repo),), image=LockedImage(reference=""))
    cluster = Cluster(
        Node("head", LocalHost("head"), settings), Node("worker", worker_host or LocalHost("worker"), settings)
    )
    try:
        yield Pair(Deployment(settings, RECIPE, lock, cluster), repo)
    finally:
        for node in cluster.nodes:
            node.close()


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that has to happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def fetch(shared: HubClient, repo: ModelRepo, path: Path, name: str = FILE) -> Recorder:
    """Download one file and compare it with its source."""
    work = Recorder()
    download(shared, wanted(repo, name), path, work)
    assert path.read_bytes() == repo.source(name).read_bytes()
    return work


def refused(shared: HubClient, repo: ModelRepo, path: Path, name: str = FILE) -> SparkserveError:
    with pytest.raises(SparkserveError) as caught:
        download(shared, wanted(repo, name), path, Recorder())
    assert caught.value.hint
    return caught.value


def body_bytes(hub: Hub) -> int:
    return sum(entry["bytes_sent"] for entry in hub.log() if entry["status"] in (200, 206))
