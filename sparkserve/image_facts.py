"""The engine image: what it should be by recipe and lock, and what the Docker engine of a node says of it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sparkserve.cluster import Deployment, Node
from sparkserve.engine_facts import docker_body
from sparkserve.errors import EXIT_NOT_READY, SparkserveError, usage_error
from sparkserve.lock import NAME as LOCK_NAME
from sparkserve.lock import Lock
from sparkserve.recipe import Recipe

_IMAGES = "/images/json"
_REPOSITORY_LABEL = "sparkserve.engine.repository"
# Nothing of these reaches an image: the recipe itself, its lock and its texts. The engine's source comes from git.
_NO_BUILD_FILES = ("recipe.toml", LOCK_NAME)
_ENGINE = "engine"
Program = tuple[str, ...]  # an entry point


@dataclass(frozen=True)
class ImageFacts:
    """One image; layer digests are the same on every node and storage driver, its id is not.

    `steps` are the bytes that each step of its history added, the first step first; most steps add none.
    """

    layers: tuple[str, ...]
    labels: Mapping[str, str]
    architecture: str
    size: int
    id: str = ""
    steps: tuple[int, ...] = ()

    def size_above(self, layers: int) -> int:
        """Give the bytes of all but the lowest layers; at most too much, where a layer is empty."""
        sizes = [size for size in self.steps if size]
        empty = len(self.layers) - len(sizes)
        return sum(sizes[max(0, layers - empty) :]) if self.steps else self.size


@dataclass(frozen=True)
class Facts:
    """The image on one node (None where it is absent), and the room of Docker's directory.

    `chains` are the layers of every image on which missing layers could be loaded; none in containerd's image store,
    which gives and takes whole images only. `known_flags` are those for which each program of it was asked before.
    """

    image: ImageFacts | None
    free_bytes: int
    docker_root: str
    chains: tuple[tuple[str, ...], ...] = ()
    known_flags: Mapping[Program, Set[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class BuildFile:
    """One file of the build context."""

    content: bytes
    executable: bool


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
                message = f"{path}: `{_ENGINE}` is where the engine's own source will be"
                raise usage_error("recipe_file", message, f"`mv {path}` to another name")
            files[name] = BuildFile(path.read_bytes(), bool(path.stat().st_mode & 0o100))
    if recipe.image.dockerfile not in files:
        message = f"recipe {recipe.name} has no file {recipe.image.dockerfile}"
        raise usage_error("recipe_file", message, "look at `image.dockerfile` in its recipe.toml")
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
    labels = {"sparkserve.recipe": recipe.name, "sparkserve.context": content_hash(recipe, lock)}
    if lock.image.engine_commit:
        labels |= {
            _REPOSITORY_LABEL: lock.image.engine_repository,
            "sparkserve.engine.commit": lock.image.engine_commit,
        }
    return labels


def long_flags(recipe: Recipe, extra_args: Sequence[str] = ()) -> dict[Program, tuple[str, ...]]:
    """List, for each program, every long flag that recipe and owner may give to it; none where no help is known."""
    found: dict[Program, tuple[str, ...]] = {}
    for rank in (0, 1) if recipe.image.flags_help else ():
        extra = () if rank and recipe.launch.worker_entrypoint else extra_args
        # `--config.key` is a way to set a part of `--config`.
        flags = [re.split("[=.]", word)[0] for word in (*recipe.launch.words_of(rank), *extra) if word[:2] == "--"]
        program = recipe.program(rank)
        found[program] = tuple(dict.fromkeys((*found.get(program, ()), *flags)))
    return found


def differing_labels(deployment: Deployment, image: ImageFacts) -> list[str]:
    """List the labels that are not what they should be; the same commit of a moved repository is the same engine."""
    wanted = labels_of(deployment.recipe, deployment.lock)
    return [key for key, text in wanted.items() if image.labels.get(key) != text and key != _REPOSITORY_LABEL]


def gather(node: Node, name: str) -> Facts:
    """Ask a node's Docker engine for an image and for its room."""
    pages = {"image": _page(name), "history": f"/images/{name}/history", "info": "/info"}
    answers = node.session.ask("facts", docker=list(pages.values()))["docker"]
    info = docker_body(answers[pages["info"]], node.role, EXIT_NOT_READY)
    root = str(info["DockerRootDir"])
    disk = node.session.ask("facts", disks=[root])["disks"][root]
    if "error" in disk:
        message = f"cannot look at the room of {root}: {disk['error']}"
        raise SparkserveError("docker_root", message, f"`sudo ls -ld {root}`", node.role, exit_code=EXIT_NOT_READY)
    image = find_image(node, answers[pages["image"]])
    if image is not None and (history := _found(node, answers[pages["history"]])):
        image = replace(image, steps=tuple(step["Size"] for step in reversed(history)))
    takes_layers = "driver-type" not in dict(info.get("DriverStatus") or ())
    chains = _chains(node, image) if takes_layers else ()
    return Facts(image, int(disk["free"]), root, chains)


def find_api_version(node: Node) -> tuple[int, ...]:
    """Ask a node's Docker engine which API it speaks."""
    answer = node.session.ask("facts", docker=["/version"])["docker"]["/version"]
    return tuple(int(part) for part in str(docker_body(answer, node.role, EXIT_NOT_READY)["ApiVersion"]).split("."))


def _chains(node: Node, image: ImageFacts | None) -> tuple[tuple[str, ...], ...]:
    """Give the layers of the image where it is there under its name, else of all images."""
    if image is not None:
        return (image.layers,)
    rows = docker_body(node.session.ask("facts", docker=[_IMAGES])["docker"][_IMAGES], node.role, EXIT_NOT_READY)
    pages = [_page(row["Id"]) for row in rows]
    answers = node.session.ask("facts", docker=pages)["docker"]
    found = [find_image(node, answers[page]) for page in pages]
    return tuple({one.layers for one in found if one is not None})


def _page(name: str) -> str:
    return f"/images/{name}/json"


def look(node: Node, name: str) -> ImageFacts | None:
    """Ask a node's Docker engine for an image."""
    page = _page(name)
    return find_image(node, node.session.ask("facts", docker=[page])["docker"][page])


def find_image(node: Node, answer: Mapping[str, Any]) -> ImageFacts | None:
    """Read the engine's answer; absent is an answer, no answer is an error."""
    body = _found(node, answer)
    if body is None:
        return None
    labels, layers = body["Config"].get("Labels") or {}, tuple(body["RootFS"].get("Layers") or ())
    return ImageFacts(layers, labels, body["Architecture"], body["Size"], body["Id"])


def _found(node: Node, answer: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the body of a JSON answer
    return None if answer.get("status") == 404 else docker_body(answer, node.role, EXIT_NOT_READY)


def check_room(node: Node, facts: Facts, needed: int, purpose: str) -> None:
    """Refuse to begin what cannot end for want of room."""
    if facts.free_bytes < needed:
        message = (
            f"{facts.docker_root} has {facts.free_bytes:,} bytes free; needed to {purpose}: {needed:,} "
            f"({needed / 1e9:.1f} GB, {needed / 2**30:.1f} GiB)"
        )
        hint = "docker system df; docker image prune"
        raise SparkserveError("no_room", message, hint, node.role, exit_code=EXIT_NOT_READY)
