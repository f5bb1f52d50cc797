"""The engine image: named by the hash of what it is made of, built or pulled on the head, shipped to the worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from sparkserve.cluster import Deployment, Node, Role
from sparkserve.errors import usage_error
from sparkserve.image_build import build, known_flags, prove, pull
from sparkserve.image_facts import Facts, ImageFacts, differing_labels, long_flags, tag_of
from sparkserve.image_facts import gather as gather_image
from sparkserve.image_ship import count_shared, ship
from sparkserve.plan import Change, key_of

BUILD_STEP = "build"
FLAGS_STEP = "flags"  # quick, and part of whatever builds or starts
SHIP_STEP = "ship"
_LANE = "image"


def gather(node: Node, deployment: Deployment) -> Facts:
    """Ask a node's Docker engine for the wanted image and for its room; the head remembers what its engine knows."""
    facts = gather_image(node, tag_of(deployment.recipe, deployment.lock))
    if node.role == "head" and facts.image is not None:
        image, programs = deployment.recipe.image, long_flags(deployment.recipe)
        return replace(facts, known_flags={one: known_flags(facts.image.id, image, one) for one in programs})
    return facts


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan the build (or pull) on the head and the way to the worker, where the image is not what is wanted."""
    recipe, head, worker = deployment.recipe, facts["head"], facts["worker"].image
    differs = _find_difference(deployment, head.image)
    wanted = long_flags(recipe, deployment.settings.extra_args)
    unknown = {flag for program, flags in wanted.items() for flag in {*flags} - head.known_flags.get(program, set())}
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
    if differing := differing_labels(deployment, image):
        return f"another {differing[0]}: {image.labels.get(differing[0])}"
    if recipe.image.architecture not in ("any", image.architecture):
        return f"for {image.architecture}"
    return f"there, but {' '.join(options)}" if options else ""


def _build_change(deployment: Deployment, before: str) -> Change:
    image, lock = deployment.recipe.image, deployment.lock.image
    make = build if image.dockerfile else pull
    built = f"built from engine {lock.engine_commit[:12]}" if lock.engine_commit else f"built on {image.base}"
    what = built if image.dockerfile else f"pulled {lock.reference}"
    tag = tag_of(deployment.recipe, deployment.lock)
    action = partial(make, deployment)
    return Change("head", BUILD_STEP, tag, before, what, action, lane=_LANE, size=image.expected_bytes)


def _flags_change(deployment: Deployment, unknown: Sequence[str]) -> Change:
    """Plan to ask an image that is there for flags which no recipe asked it for: it may be that of another recipe."""
    tag = tag_of(deployment.recipe, deployment.lock)
    before = f"there; not asked whether its engine knows {', '.join(unknown)}"
    return Change("head", FLAGS_STEP, tag, before, "asked", partial(prove, deployment, tag), lane=_LANE)


def _ship_change(deployment: Deployment, before: str, size: int) -> Change:
    tag = tag_of(deployment.recipe, deployment.lock)
    action = partial(ship, deployment.cluster, tag)
    needs = (key_of("head", BUILD_STEP, tag), key_of("head", FLAGS_STEP, tag))
    return Change("worker", SHIP_STEP, tag, before, "the head's layers", action, needs, _LANE, size)
