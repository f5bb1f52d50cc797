"""What the Docker engine of a node says of an image, and how much room it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sparkserve.cluster import Node
from sparkserve.errors import EXIT_NOT_READY, SparkserveError, docker_unreachable

_IMAGES = "/images/json"


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
    """The image on one node (None where it is absent), the room of Docker's directory, and the engine's API version.

    `chains` are the layers of every image on which missing layers could be loaded; none in containerd's image store,
    which gives and takes whole images only. `known_flags` are those that the engine in the image was asked for before.
    """

    image: ImageFacts | None
    free_bytes: int
    docker_root: str
    api_version: tuple[int, ...]
    chains: tuple[tuple[str, ...], ...] = ()
    known_flags: frozenset[str] = frozenset()


def gather(node: Node, name: str) -> Facts:
    """Ask a node's Docker engine for an image and for its room."""
    pages = {"image": _page(name), "history": f"/images/{name}/history", "info": "/info", "version": "/version"}
    answers = node.session.ask("facts", docker=list(pages.values()))["docker"]
    info, version = _body(node, answers[pages["info"]]), _body(node, answers[pages["version"]])
    root = str(info["DockerRootDir"])
    disk = node.session.ask("facts", disks=[root])["disks"][root]
    if "error" in disk:
        message = f"cannot look at the room of {root}: {disk['error']}"
        raise SparkserveError("docker_root", message, node=node.role, exit_code=EXIT_NOT_READY)
    api_version = tuple(int(part) for part in str(version["ApiVersion"]).split("."))
    image = find_image(node, answers[pages["image"]])
    if image is not None and (history := _found(node, answers[pages["history"]])):
        image = replace(image, steps=tuple(step["Size"] for step in reversed(history)))
    takes_layers = "driver-type" not in dict(info.get("DriverStatus") or ())
    chains = _chains(node, image) if takes_layers else ()
    return Facts(image, int(disk["free"]), root, api_version, chains)


def _chains(node: Node, image: ImageFacts | None) -> tuple[tuple[str, ...], ...]:
    """Give the layers of the image where it is there under its name, else of all images."""
    if image is not None:
        return (image.layers,)
    rows = _body(node, node.session.ask("facts", docker=[_IMAGES])["docker"][_IMAGES])
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
    return None if answer.get("status") == 404 else _body(node, answer)


def _body(node: Node, answer: Mapping[str, Any]) -> Any:  # noqa: ANN401 - the body of a JSON answer
    if answer.get("status") != 200:
        raise docker_unreachable(answer, node.role, EXIT_NOT_READY)
    return answer["body"]


def check_room(node: Node, facts: Facts, needed: int, purpose: str) -> None:
    """Refuse to begin what cannot end for want of room."""
    if facts.free_bytes < needed:
        message = (
            f"{facts.docker_root} has {facts.free_bytes:,} bytes free; needed to {purpose}: {needed:,} "
            f"({needed / 1e9:.1f} GB, {needed / 2**30:.1f} GiB)"
        )
        hint = "docker system df; docker image prune"
        raise SparkserveError("no_room", message, hint, node.role, exit_code=EXIT_NOT_READY)
