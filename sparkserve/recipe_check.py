"""What can be proved of a recipe without hardware: it renders for both ranks, and nothing in it collides (pure)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from sparkserve import image_facts
from sparkserve.blueprint import Blueprint, draw
from sparkserve.container import ContainerSpec
from sparkserve.errors import SparkserveError, flatten
from sparkserve.parameters import decide_ports, flag_name, is_flag
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings

_GIB = 1024**3
Found = TypeVar("Found")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `problem` is empty where it is right."""

    what: str
    observed: str
    problem: str = ""
    hint: str = ""


def draw_open(recipe: Recipe) -> Blueprint:
    """Build both ranks' containers without any settings or facts."""
    return draw(Settings(), recipe, None, None, "places in <> are looked up on the nodes")


def check_recipe(recipe: Recipe) -> tuple[list[Finding], Blueprint | None]:
    """Check a recipe that parses; gives both ranks' containers where they can be rendered."""
    ports, _ = _try("ports", lambda: decide_ports(Settings(), recipe), str)
    files, _ = _try("files", lambda: _files(recipe), lambda found: f"{len(found)} files of the recipe are there")
    rendered, drawn = _try("commands of both ranks", lambda: draw_open(recipe), lambda _: "they render")
    findings = [
        Finding("schema", "every key is known and every value fits"),
        ports,
        files,
        *_check_dockerfile(recipe),
        *_check_mounts(recipe),
        _check_memory(recipe),
        _check_parameters(recipe),
        rendered,
    ]
    for spec in drawn.specs.values() if drawn else ():
        findings += _check_flags(spec)
    if not recipe.image.flags_help:
        findings.append(Finding("flags", "not asked of the engine before the start: `image.flags_help` is empty"))
    return findings, drawn


def _try(what: str, look: Callable[[], Found], show: Callable[[Found], str]) -> tuple[Finding, Found | None]:
    try:
        found = look()
    except SparkserveError as error:
        singles = flatten(error)
        return Finding(what, "", "; ".join(single.message for single in singles), singles[0].hint), None
    return Finding(what, show(found)), found


def _files(recipe: Recipe) -> list[str]:
    """Read every file that the recipe names; those beside the Dockerfile are for it alone."""
    built = list(image_facts.build_files(recipe)) if recipe.image.dockerfile else []
    prologue = recipe.chat_template.prologue if recipe.chat_template else ""
    named = [name for name in (prologue, *(item.file for item in recipe.derived)) if name and recipe.file(name)]
    return [*built, *named]


def _check_dockerfile(recipe: Recipe) -> Iterator[Finding]:
    """Look that a Dockerfile uses what is pinned for it: the base, and the engine's source just where there is one."""
    name, repository = recipe.image.dockerfile, recipe.image.engine_repository
    try:
        text = re.sub(r"(?m)^\s*#.*$", "", recipe.file(name).decode(errors="replace"))
    except SparkserveError:  # there is none, or it is told with the files
        return
    problem = ""
    if not re.search(r"(?im)^\s*FROM\s.*\$(\{BASE\}|BASE\b)", text):
        problem = "no `FROM ${BASE}`: the pinned base image would not be used"
    elif repository and not re.search(r"\bengine\b|(COPY|ADD) .*\.\s", text):
        problem = "it uses nothing of `engine/`, where the engine's source is"
    elif not repository and re.search(r"(COPY|ADD)\s+(--\S+\s+)*(\./)?engine[/\s]", text):
        problem = "it copies `engine/`, which only an `engine_repository` puts there"
    yield Finding(
        "Dockerfile", "it uses what is pinned for it", problem, f"look at {name}, and at `image` of the recipe"
    )


def _check_parameters(recipe: Recipe) -> Finding:
    """Find what the owner may set and no argument says: it would be ignored without a word."""
    texts, switched = " ".join(recipe.templated_texts()), {one.parameter for one in recipe.launch.switches}
    owned = [name for name in ("model_name", "context", "requests", "drafts") if getattr(recipe.parameters, name)]
    places = [*owned, "api_host", *(f"ports.{name}" for name in recipe.ports.named)]
    lost = [f"${{{name}}}" for name in places if name not in switched and f"${{{name}}}" not in texts]
    front = recipe.chat_template and recipe.chat_template.prologue
    lost += ["thinking"] if recipe.parameters.thinking is not None and not front and "thinking" not in switched else []
    ranks = [(recipe.program(rank), recipe.launch.words_of(rank)) for rank in (0, 1)]
    own_env = recipe.launch.head_env or recipe.launch.worker_env
    lost += ["${rank}"] if ranks[0] == ranks[1] and not own_env and "${rank}" not in texts else []
    problem = f"in no argument or environment: {', '.join(lost)}" if lost else ""
    hint = "name each in `launch`; leave out of `parameters` what the engine has not"
    return Finding("parameters", "each reaches the engine, and the ranks differ", problem, hint)


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
