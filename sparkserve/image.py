"""The engine image: named by the hash of what it is made of, built or pulled on the head, shipped to the worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from sparkserve.cluster import Deployment, Node, Role
from sparkserve.errors import usage_error
from sparkserve.image_build import BuildFile, Order, build, known_flags, prove, pull
from sparkserve.image_facts import Facts, ImageFacts
from sparkserve.image_facts import gather as gather_image
from sparkserve.image_ship import count_shared, ship
from sparkserve.lock import NAME as LOCK_NAME
from sparkserve.lock import Lock
from sparkserve.plan import Change, key_of
from sparkserve.recipe import Recipe

_REPOSITORY_LABEL = "sparkserve.engine.repository"
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
        _REPOSITORY_LABEL: lock.image.engine_repository,
        "sparkserve.engine.commit": lock.image.engine_commit,
        "sparkserve.context": content_hash(recipe, lock),
    }


def long_flags(recipe: Recipe) -> tuple[str, ...]:
    """List every long flag that the recipe may give to the engine."""
    words = recipe.launch.words
    return tuple(dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--") and word != "--"))


def gather(node: Node, deployment: Deployment) -> Facts:
    """Ask a node's Docker engine for the wanted image and for its room; the head remembers what its engine knows."""
    facts = gather_image(node, tag_of(deployment.recipe, deployment.lock))
    if node.role == "head" and facts.image is not None:
        return replace(facts, known_flags=known_flags(facts.image.id, deployment.recipe.image))
    return facts


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan the build (or pull) on the head and the way to the worker, where the image is not what is wanted."""
    recipe, head, worker = deployment.recipe, facts["head"], facts["worker"].image
    differs = _find_difference(deployment, head.image)
    unknown = set(long_flags(recipe)) - head.known_flags if recipe.image.flags_help else set()
    changes = []
    if differs:
        changes.append(_build_change(deployment, differs))
    elif unknown:
        changes.append(_flags_change(deployment, sorted(unknown)))
    if differs or head.image is None:
        before = "absent" if worker is None else "not known to be the same"
        changes.append(_ship_change(deployment, before, recipe.image.expected_bytes))
    elif worker is None or worker.layers != head.image.layers:
        shared = count_shared(head, facts["worker"])
        other = "absent" if worker is None else "other layers"
        before = f"{shared} of {len(head.image.layers)} layers" if shared else other
        changes.append(_ship_change(deployment, before, head.image.size_above(shared)))
    return changes


def _find_difference(deployment: Deployment, image: ImageFacts | None) -> str:
    """Say why the head's image is not what is wanted; empty when it is."""
    recipe, options = deployment.recipe, deployment.build_options
    if "--no-cache" in options and not recipe.image.dockerfile:
        message = f"recipe {recipe.name} names a finished image: there is no build that could do without its cache"
        raise usage_error("nothing_to_build", message, "sparkserve build --pull")
    if image is None:
        return "absent"
    differing = [key for key, value in labels_of(recipe, deployment.lock).items() if image.labels.get(key) != value]
    # The same commit of a moved repository is the same engine.
    differing = [key for key in differing if key != _REPOSITORY_LABEL]
    if differing:
        return f"another {differing[0]}: {image.labels.get(differing[0])}"
    if recipe.image.architecture not in ("any", image.architecture):
        return f"for {image.architecture}"
    return f"there, but {' '.join(options)}" if options else ""


def _build_change(deployment: Deployment, before: str) -> Change:
    image, lock = deployment.recipe.image, deployment.lock.image
    make = build if image.dockerfile else pull
    what = f"built from engine {lock.engine_commit[:12]}" if image.dockerfile else f"pulled {lock.reference}"
    order = _order(deployment)
    action = partial(make, deployment.cluster.head, order)
    return Change("head", BUILD_STEP, order.tag, before, what, action, lane=_LANE, size=image.expected_bytes)


def _flags_change(deployment: Deployment, unknown: Sequence[str]) -> Change:
    """Plan to ask an image that is there for flags which no recipe asked it for: it may be that of another recipe."""
    order = _order(deployment)
    # It is as wanted already, but for the address of its repository, which may have moved.
    order = replace(order, labels={key: text for key, text in order.labels.items() if key != _REPOSITORY_LABEL})
    action = partial(prove, deployment.cluster.head, order, order.tag)
    before = f"there; not asked whether its engine knows {', '.join(unknown)}"
    return Change("head", BUILD_STEP, order.tag, before, "asked", action, lane=_LANE)


def _order(deployment: Deployment) -> Order:
    recipe, lock = deployment.recipe, deployment.lock
    files = build_files(recipe) if recipe.image.dockerfile else {}
    return Order(
        tag_of(recipe, lock),
        recipe.image,
        lock.image,
        files,
        labels_of(recipe, lock),
        long_flags(recipe),
        deployment.build_options,
    )


def _ship_change(deployment: Deployment, before: str, size: int) -> Change:
    tag = tag_of(deployment.recipe, deployment.lock)
    action = partial(ship, deployment.cluster, tag)
    needs = (key_of("head", BUILD_STEP, tag),)
    return Change("worker", SHIP_STEP, tag, before, "the head's layers", action, needs, _LANE, size)
