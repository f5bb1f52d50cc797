"""The engine image: named by the hash of what it is made of, built or pulled on the head, shipped to the worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from sparkserve.cluster import Deployment, Node, Role
from sparkserve.errors import usage_error
from sparkserve.image_build import BuildFile, Order, build, pull
from sparkserve.image_facts import Facts, ImageFacts
from sparkserve.image_facts import gather as gather_image
from sparkserve.image_ship import ship
from sparkserve.lock import NAME as LOCK_NAME
from sparkserve.lock import Lock
from sparkserve.plan import Change, Work, key_of
from sparkserve.recipe import Recipe

BUILD_STEP = "build"
SHIP_STEP = "ship"
_LANE = "image"
# Nothing of these reaches an image: the recipe itself, its lock and its texts. The engine's source comes from git.
_NO_BUILD_FILES = ("recipe.toml", LOCK_NAME)
_ENGINE = "engine"

__all__ = ["Facts", "ImageFacts", "build_files", "gather", "labels_of", "long_flags", "plan", "tag_of"]


def build_files(recipe: Recipe) -> dict[str, BuildFile]:
    """Read the build context of a recipe: its own files over those of the recipe it extends."""
    files: dict[str, BuildFile] = {}
    prologue = recipe.chat_template.prologue if recipe.chat_template else ""
    left_out = {*_NO_BUILD_FILES, prologue, *(item.file for item in recipe.derived)}
    for directory in reversed(recipe.directories):
        for name, path in _walk(directory):
            if name in left_out or name.endswith(".md"):
                continue
            if name.split("/")[0] == _ENGINE:
                raise usage_error("recipe_file", f"{path}: `{_ENGINE}` is where the engine's own source will be")
            files[name] = BuildFile(path.read_bytes(), bool(path.stat().st_mode & 0o100))
    if recipe.image.dockerfile not in files:
        raise usage_error("recipe_file", f"recipe {recipe.name} has no file {recipe.image.dockerfile}")
    return files


def _walk(directory: Path) -> Iterator[tuple[str, Path]]:
    """List regular files below a directory; links could lead out of it, and hidden files are an editor's or git's."""
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in name.split("/"))
        if path.is_file() and not path.is_symlink() and not is_hidden:
            yield name, path


def content_hash(recipe: Recipe, lock: Lock) -> str:
    """Hash everything that decides the image."""
    made_of: object = lock.image.reference
    if recipe.image.dockerfile:
        files = {
            name: [hashlib.sha256(file.content).hexdigest(), file.executable]
            for name, file in build_files(recipe).items()
        }
        base = lock.image.base.partition("@")[2]
        arguments = recipe.image.build_arguments
        made_of = [recipe.image.dockerfile, files, base, lock.image.engine_commit, arguments]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def tag_of(recipe: Recipe, lock: Lock) -> str:
    """Give the name of the engine image on both nodes: `sparkserve/<recipe>:<12 hex digits>`."""
    return f"sparkserve/{recipe.name}:{content_hash(recipe, lock)[:12]}"


def labels_of(recipe: Recipe, lock: Lock) -> dict[str, str]:
    """Give the labels that a built image must carry; a pulled one has its makers' own."""
    if not recipe.image.dockerfile:
        return {}
    return {
        "sparkserve.recipe": recipe.name,
        "sparkserve.engine.repository": lock.image.engine_repository,
        "sparkserve.engine.commit": lock.image.engine_commit,
        "sparkserve.context": content_hash(recipe, lock),
    }


def long_flags(recipe: Recipe) -> tuple[str, ...]:
    """List every long flag that the recipe may give to the engine."""
    words = recipe.launch.words
    return tuple(dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--") and word != "--"))


def gather(node: Node, deployment: Deployment) -> Facts:
    """Ask a node's Docker engine for the wanted image, and for its room."""
    return gather_image(node, tag_of(deployment.recipe, deployment.lock))


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan the build (or pull) on the head and the way to the worker, where the image is not what is wanted."""
    recipe, lock = deployment.recipe, deployment.lock
    tag = tag_of(recipe, lock)
    head, worker = facts["head"].image, facts["worker"].image
    changes = []
    differs = _find_difference(recipe, lock, head)
    if differs:
        changes.append(_build_change(recipe, lock, deployment, differs))
    if differs or head is None or worker is None or worker.layers != head.layers:
        before = "absent" if worker is None else "other layers" if head and not differs else "not known to be the same"
        size = head.size if head and not differs else recipe.image.expected_bytes

        def send(work: Work) -> str:
            return ship(deployment.cluster, tag, work)

        needs = (key_of("head", BUILD_STEP, tag),)
        changes.append(Change("worker", SHIP_STEP, tag, before, "the head's layers", send, needs, _LANE, size))
    return changes


def _find_difference(recipe: Recipe, lock: Lock, image: ImageFacts | None) -> str:
    """Say what is not as wanted of the head's image; empty when nothing is."""
    if image is None:
        return "absent"
    differing = [key for key, value in labels_of(recipe, lock).items() if image.labels.get(key) != value]
    # The same commit of a moved repository is the same engine.
    differing = [key for key in differing if key != "sparkserve.engine.repository"]
    if differing:
        return f"another {differing[0]}: {image.labels.get(differing[0])}"
    if recipe.image.architecture not in ("any", image.architecture):
        return f"for {image.architecture}"
    return ""


def _build_change(recipe: Recipe, lock: Lock, deployment: Deployment, before: str) -> Change:
    tag, image = tag_of(recipe, lock), recipe.image
    files = build_files(recipe) if image.dockerfile else {}
    order = Order(tag, image, lock.image, files, labels_of(recipe, lock), long_flags(recipe))
    make = build if image.dockerfile else pull
    what = (
        f"built from engine {lock.image.engine_commit[:12]}" if image.dockerfile else f"pulled {lock.image.reference}"
    )
    action = partial(make, deployment.cluster.head, order)
    return Change("head", BUILD_STEP, tag, before, what, action, lane=_LANE, size=image.expected_bytes)
