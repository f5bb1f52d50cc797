"""Both ranks' containers before anything starts: from facts seen now or before, else with named places."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import Field

from sparkserve import chat_template, derive, image_facts, state_file
from sparkserve.cluster import ROLES, Cluster, Deployment, Node, Role
from sparkserve.container import ContainerSpec, LinkPlace, build_spec
from sparkserve.errors import SparkserveError, usage_error
from sparkserve.hosts import UnreachableHost
from sparkserve.lock import Lock, OpenLock, open_lock
from sparkserve.recipe import Data, Recipe
from sparkserve.settings import Settings

Links = Mapping[Role, LinkPlace]


class Place(Data):
    """One node as it was seen: its home, files of others that it uses, its end of the cable."""

    home: str
    adopted: dict[str, str] = Field(default_factory=dict)
    address: str = ""
    interface: str = ""
    hcas: tuple[str, ...] = ()
    gid_index: int | None = None

    @property
    def link(self) -> LinkPlace:
        """Its end of the cable."""
        return LinkPlace(self.address, self.interface, self.hcas, self.gid_index)


class Seen(Data):
    """Facts of both nodes and when they were seen, in seconds since 1970; `raw` is all that `doctor --record` saw."""

    seconds: float
    nodes: dict[Role, Place]
    raw: dict[Role, dict[str, Any]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Blueprint:
    """The containers of both ranks, what they rest on, and how old that is in seconds."""

    specs: Mapping[Role, ContainerSpec]
    basis: str
    age: float | None
    locked: bool


def build_specs(deployment: Deployment, links: Links) -> dict[Role, ContainerSpec]:
    """Build both ranks' containers."""
    recipe, lock = deployment.recipe, deployment.lock
    is_open = isinstance(lock, OpenLock)
    name = f"sparkserve/{recipe.name}:<image.id>" if is_open else image_facts.tag_of(recipe, lock)
    specs = {}
    for node in deployment.cluster.nodes:
        files = derive.mounts_on(node, deployment)
        if recipe.chat_template is not None:
            named = f"{node.cache_dir}/templates/<id>.jinja"
            files[recipe.chat_template.mount] = named if is_open else chat_template.path_on(node, deployment)
        specs[node.role] = build_spec(deployment, node.rank, links, files, name)
    return specs


def draw(settings: Settings, recipe: Recipe, lock: Lock | None, seen: Seen | None, basis: str = "") -> Blueprint:
    """Build both ranks' containers without asking any node."""
    places = {role: _place(settings, role, seen) for role in ROLES}
    nodes = [_known_node(settings, role, places[role]) for role in ROLES]
    deployment = Deployment(settings, recipe, lock or open_lock(recipe), Cluster(nodes[0], nodes[1]))
    age = None if seen is None else max(0.0, time.time() - seen.seconds)
    links = {role: place.link for role, place in places.items()}
    return Blueprint(build_specs(deployment, links), basis, age, lock is not None)


def _place(settings: Settings, role: Role, seen: Seen | None) -> Place:
    address = settings.head_link if role == "head" else settings.worker_link
    found = seen.nodes.get(role) if seen else None
    if found is None:
        return Place(home=str(Path.home()) if role == "head" else "<worker.home>", address=address)
    is_record = bool(seen and seen.raw)  # whose addresses are replaced, and are never those of the settings
    if address and found.address != address and not is_record:  # another cable: what was seen of it says nothing
        return Place(home=found.home, adopted=found.adopted, address=address)
    return found


def _known_node(settings: Settings, role: Role, place: Place) -> Node:
    reason = SparkserveError("not_looked", "a plan from memory asks no node", "sparkserve plan --live", role)
    node = Node(role, UnreachableHost(role, reason), settings)
    node.identity = {"home": place.home}
    node.adopted = place.adopted
    return node


def see(cluster: Cluster, links: Links) -> Seen:
    """Gather what a later plan needs of both nodes."""
    return Seen(seconds=time.time(), nodes=cluster.on_both(lambda node: see_node(node, links[node.role])))


def see_node(node: Node, link: LinkPlace) -> Place:
    """Gather what a later plan needs of one node."""
    end = {one.name: getattr(link, one.name) for one in fields(LinkPlace)}
    return Place(home=node.identity["home"], adopted=node.adopted, **end)


def save_facts(path: Path, seen: Seen) -> None:
    """Keep facts for plans without hosts."""
    state_file.write(path, seen.model_dump(mode="json"), indent=1)


def refuse_other_file(path: Path) -> None:
    """Keep facts from being written over what is no file of facts."""
    if path.is_dir():
        raise usage_error("facts_unreadable", f"{path} is a directory", "nothing was written; name a new file")
    try:
        if path.exists():
            load_facts(path)
    except SparkserveError as error:
        error.hint = "nothing was written; name a new file"
        raise


def load_facts(path: Path) -> Seen:
    """Read facts that were kept."""
    try:
        seen = Seen.model_validate_json(path.read_text(encoding="utf-8"))
        if not seen.nodes:
            raise ValueError("no node")
    except OSError as error:
        raise usage_error("facts_unreadable", f"cannot read {path}: {error.strerror}", "look at --facts") from error
    except ValueError as error:  # no UTF-8, not of this form, or of no node
        message = f"{path} holds no facts of a pair"
        raise usage_error("facts_broken", message, "sparkserve plan --live") from error
    return seen
