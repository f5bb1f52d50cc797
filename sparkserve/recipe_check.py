"""What can be proved of a recipe without hardware: it renders for both ranks, and nothing in it collides (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sparkserve import image
from sparkserve.blueprint import Blueprint, draw
from sparkserve.container import ContainerSpec
from sparkserve.errors import SparkserveError, flatten
from sparkserve.parameters import decide_ports, flag_name, is_flag
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings

_GIB = 1024**3


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `problem` is empty where it is right."""

    what: str
    observed: str
    problem: str = ""
    hint: str = ""


def check_recipe(recipe: Recipe, settings: Settings) -> tuple[list[Finding], Blueprint | None]:
    """Check a recipe that parses; gives both ranks' containers where they can be rendered."""
    findings = [
        Finding("schema", "every key is known and every value fits"),
        _try("ports", lambda: f"API {(ports := decide_ports(settings, recipe)).api}, ranks {ports.master}"),
        _try("files", lambda: f"{len(_files(recipe))} files of the recipe are there"),
        *_check_mounts(recipe),
        _check_memory(recipe),
    ]
    drawn: list[Blueprint] = []

    def render() -> str:
        drawn.append(draw(settings, recipe, None, None))
        return ", ".join(f"{spec.name}: {len(spec.argv)} arguments" for spec in drawn[0].specs.values())

    findings.append(_try("commands of both ranks", render))
    for spec in drawn[0].specs.values() if drawn else ():
        findings += _check_flags(spec)
    if not recipe.image.flags_help:
        findings.append(Finding("flags", "not asked of the engine before the start: `image.flags_help` is empty"))
    return findings, drawn[0] if drawn else None


def _try(what: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(what, look())
    except SparkserveError as error:
        singles = flatten(error)
        return Finding(what, "", "; ".join(single.message for single in singles), singles[0].hint)


def _files(recipe: Recipe) -> list[bytes]:
    if recipe.image.dockerfile:
        image.build_files(recipe)
    prologue = recipe.chat_template.prologue if recipe.chat_template else ""
    names = [recipe.image.dockerfile, prologue, *(item.file for item in recipe.derived)]
    return [recipe.file(name) for name in names if name]


def _check_mounts(recipe: Recipe) -> Iterator[Finding]:
    """Find places in the container that two things want; single files may lie among the weights."""
    template = [recipe.chat_template.mount] if recipe.chat_template else []
    key = [recipe.launch.api_key_mount] if recipe.launch.api_key_mount else []
    folders = {weights.mount for weights in recipe.weights if weights.mount}
    others = [*folders, *template, *key, *(item.mount for item in recipe.derived)]
    targets: Counter[str] = Counter()
    for rank in (0, 1):  # each rank has a place of its own for what only it is given
        own = [mount.target for mount in recipe.container.mounts if rank in mount.ranks]
        targets |= Counter(target.rstrip("/") for target in (*others, *own))
    doubled = [target for target, count in targets.items() if count > 1]
    problem = f"mounted twice: {', '.join(doubled)}" if doubled else ""
    yield Finding("mounts", f"{len(targets)} places in the container", problem, "give each a path of its own")


def _check_memory(recipe: Recipe) -> Finding:
    memory = recipe.memory
    total = memory.weights_gib + memory.kv_bytes / _GIB + memory.floor_gib
    observed = (
        f"weights {memory.weights_gib:g} + cache {memory.kv_bytes / _GIB:.1f} + floor {memory.floor_gib:g} = "
        f"{total:.1f} GiB; a node must have {memory.required_gib:g} GiB"
    )
    problem = "the parts need more than `memory.required_gib`" if total > memory.required_gib else ""
    return Finding("memory", observed, problem, f"set memory.required_gib to {total:.0f} or more")


def _check_flags(spec: ContainerSpec) -> Iterator[Finding]:
    counted = Counter(flag_name(word) for word in spec.argv if is_flag(word))
    doubled = [flag for flag, count in counted.items() if count > 1]
    problem = f"given twice: {', '.join(doubled)}" if doubled else ""
    hint = "look at argv, head_argv, worker_argv and switches of `launch`"
    yield Finding(f"flags of {spec.name}", f"{len(counted)} flags", problem, hint)
