"""What the Docker engine of a node says of an image, and how much room it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkserve.cluster import Node
from sparkserve.errors import EXIT_NOT_READY, SparkserveError, docker_unreachable


@dataclass(frozen=True)
class ImageFacts:
    """One image; layer digests are the same on every node and storage driver, its id is not."""

    layers: tuple[str, ...]
    labels: Mapping[str, str]
    architecture: str
    size: int


@dataclass(frozen=True)
class Facts:
    """The image on one node (None where it is absent), the room of Docker's directory, and the engine's API version."""

    image: ImageFacts | None
    free_bytes: int
    docker_root: str
    api_version: tuple[int, ...]


def gather(node: Node, name: str) -> Facts:
    """Ask a node's Docker engine for an image and for its room."""
    pages = {"image": f"/images/{name}/json", "info": "/info", "version": "/version"}
    answers = node.session.ask("facts", docker=list(pages.values()))["docker"]
    info, version = _body(node, answers[pages["info"]]), _body(node, answers[pages["version"]])
    root = str(info["DockerRootDir"])
    disk = node.session.ask("facts", disks=[root])["disks"][root]
    if "error" in disk:
        message = f"cannot look at the room of {root}: {disk['error']}"
        raise SparkserveError("docker_root", message, node=node.role, exit_code=EXIT_NOT_READY)
    api_version = tuple(int(part) for part in str(version["ApiVersion"]).split("."))
    return Facts(find_image(node, answers[pages["image"]]), int(disk["free"]), root, api_version)


def look(node: Node, name: str) -> ImageFacts | None:
    """Ask a node's Docker engine for an image."""
    page = f"/images/{name}/json"
    return find_image(node, node.session.ask("facts", docker=[page])["docker"][page])


def find_image(node: Node, answer: Mapping[str, Any]) -> ImageFacts | None:
    """Read the engine's answer; absent is an answer, no answer is an error."""
    if answer.get("status") == 404:
        return None
    body = _body(node, answer)
    labels = body["Config"].get("Labels") or {}
    return ImageFacts(tuple(body["RootFS"].get("Layers") or ()), labels, body["Architecture"], body["Size"])


def _body(node: Node, answer: Mapping[str, Any]) -> Mapping[str, Any]:
    if answer.get("status") != 200:
        raise docker_unreachable(answer, node.role, EXIT_NOT_READY)
    body: Mapping[str, Any] = answer["body"]
    return body


def check_room(node: Node, facts: Facts, needed: int, purpose: str) -> None:
    """Refuse to begin what cannot end for want of room."""
    if facts.free_bytes < needed:
        message = (
            f"{facts.docker_root} has {facts.free_bytes:,} bytes free; needed to {purpose}: {needed:,} "
            f"({needed / 1e9:.1f} GB, {needed / 2**30:.1f} GiB)"
        )
        hint = "docker system df; docker image prune"
        raise SparkserveError("no_room", message, hint, node.role, exit_code=EXIT_NOT_READY)
