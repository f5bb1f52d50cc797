"""A recipe, a pair with a scripted `docker`, and the two steps of its image, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparkserve import image, image_facts
from sparkserve.cluster import Cluster, Deployment
from sparkserve.hosts import LocalHost
from sparkserve.lock import Lock, LockedImage
from sparkserve.plan import Cancelled, Change, Plan
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings
from tests.component.fake_docker import FakeDocker
from tests.fakes import FakeSession, RecordingWork, make_node

DIGEST = "sha256:" + "0" * 64
RECIPE = """
schema = 1
name = "little"
title = "a little engine"
engine = "little"
[parameters]
model_name = "m"
context = 1024
[ports]
api = 8888
master = 29551
[[weights]]
name = "model"
repository = "a/b"
revision = "main"
mount = "/model"
[image]
dockerfile = "Dockerfile"
base = "registry.lab/base:1"
architecture = "amd64"
entrypoint = ["/opt/engine/run", "now"]
flags_help = ["serve", "--help"]
expected_bytes = 1_000_000
[launch]
argv = ["serve", "/model", "--rank", "${rank}"]
[[launch.switches]]
parameter = "thinking"
on = ["--thinking"]
off = ["--no-thinking"]
[memory]
required_gib = 1
"""


def lock_of(recipe: Recipe, repository: str = "somewhere", commit: str = "1" * 40, **changes: str) -> Lock:
    locked = {"base": f"registry.lab/base@{DIGEST}", "engine_repository": repository, "engine_commit": commit}
    return Lock(schema=1, recipe=recipe.name, weights=(), image=LockedImage.model_validate({**locked, **changes}))


def make_deployment(recipe: Recipe, docker: FakeDocker, directory: Path, lock: Lock) -> Deployment:
    settings = Settings.model_validate({"cache_dir": directory / "cache"})
    nodes = [
        make_node(role, settings, host=LocalHost(role), session=session(docker, role)) for role in ("head", "worker")
    ]
    return Deployment(settings, recipe, lock, Cluster(*nodes))


def session(docker: FakeDocker, role: str) -> FakeSession:
    def facts(**asked: Any) -> dict[str, Any]:
        free = docker.read("behaviour").get(f"{role}_free", 10**12)
        return {
            "docker": {page: docker.answer(role, page) for page in asked.get("docker", ())},
            "disks": {root: {"free": free} for root in asked.get("disks", ())},
            "files": dict.fromkeys(asked.get("files", ()), "MemAvailable:   9000000 kB\n"),
        }

    def mkdir(paths: list[str]) -> None:
        for path in paths:
            Path(path).mkdir(parents=True, exist_ok=True)

    return FakeSession({"facts": facts, "hello": {"home": "/nowhere", "cpus": 8}, "mkdir": mkdir})


def plan(deployment: Deployment) -> list[Change]:
    facts = deployment.cluster.on_both(lambda node: image.gather(node, deployment))
    return list(Plan(tuple(image.plan(deployment, facts))).changes)


def tag(deployment: Deployment) -> str:
    return image_facts.tag_of(deployment.recipe, deployment.lock)


def build(deployment: Deployment, work: RecordingWork | None = None) -> str:
    change = plan(deployment)[0]
    assert (change.node, change.step) == ("head", "build")
    return change.action(work or RecordingWork())


def ship(deployment: Deployment, work: RecordingWork | None = None) -> str:
    change = plan(deployment)[-1]
    assert (change.node, change.step) == ("worker", "ship")
    return change.action(work or RecordingWork())


def is_gone(pid_file: Path) -> bool:
    return not Path(f"/proc/{pid_file.read_text()}").exists()


def interrupted_when(pid_file: Path) -> RecordingWork:
    """Give the work of a run that is interrupted once the fake command has begun and left its process id."""

    def check() -> None:
        if pid_file.exists() and pid_file.read_text():
            raise Cancelled

    return RecordingWork(on_check=check)
