"""A whole deployment of the shipped recipe on two fake nodes, for tests that build containers."""

from __future__ import annotations

from typing import Any

from sparkserve.cluster import Cluster, Deployment, Role
from sparkserve.container import LinkPlace
from sparkserve.lock import Lock, LockedImage, LockedTemplate
from sparkserve.manifest import Manifest, ManifestFile
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from tests.fakes import FakeSession, make_node

IMAGE = "sparkserve/tensorfold-1017:0123456789ab"
TEMPLATE = "/home/spark/sparkserve/cache/templates/0011223344556677.jinja"
FILES = {"/model/chat_template.jinja": TEMPLATE}


LINKS: dict[Role, LinkPlace] = {
    "head": LinkPlace("10.100.8.1", "enp1s0f1np1", ("rocep1s0f1", "roceP2p1s0f1"), 3),
    "worker": LinkPlace("10.100.8.2", "enp1s0f0np0", ("rocep1s0f0", "roceP2p1s0f0"), 5),
}


def make_lock(recipe: Recipe) -> Lock:
    def manifest(name: str, repository: str, commit: str, paths: list[str]) -> Manifest:
        files = tuple(ManifestFile(path=path, size=7, sha256=f"{len(path):064x}", git_sha1=None) for path in paths)
        return Manifest(name=name, repository=repository, commit=commit, files=files)

    model, engram = recipe.weights
    return Lock(
        recipe=recipe.name,
        weights=(
            manifest("model", model.repository, "a" * 40, ["config.json", "model-00001-of-00039.safetensors"]),
            manifest("engram", engram.repository, "b" * 40, ["model-00047-of-00048.safetensors"]),
        ),
        chat_template=LockedTemplate(
            repository="org/template",
            commit="c" * 40,
            file=ManifestFile(path="chat_template.jinja", size=9, sha256=None, git_sha1="d" * 40),
        ),
        image=LockedImage(base="nvcr.io/nvidia/pytorch@sha256:" + "e" * 64),
    )


def make_deployment(
    changes: dict[str, Any] | None = None, *, recipe: Recipe | None = None, cluster: Cluster | None = None
) -> Deployment:
    recipe = recipe or load_recipe("tensorfold-1017")
    settings = Settings.model_validate(changes or {})
    return Deployment(settings, recipe, make_lock(recipe), cluster or make_pair(settings))


def make_pair(
    settings: Settings | None = None, *, head: FakeSession | None = None, worker: FakeSession | None = None
) -> Cluster:
    """Build a pair whose accounts are known; the worker uses one file of somebody else in place."""
    nodes = [make_node("head", settings, session=head), make_node("worker", settings, session=worker)]
    for node in nodes:
        node.__dict__["identity"] = {"home": "/home/spark"}
        node.__dict__["adopted"] = {}
    place = f"deepseek-ai/DeepSeek-V4.1-Flash-1017/{'b' * 40}/model-00047-of-00048.safetensors"
    nodes[1].__dict__["adopted"] = {place: "/srv/hub/engram, of others/47.safetensors"}
    return Cluster(nodes[0], nodes[1])
