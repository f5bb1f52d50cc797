"""Recipes as files: found by name, path or pinned git address, laid over what they extend, read and checked."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from sparkserve.errors import Failures, SparkserveError, usage_error
from sparkserve.recipe import Recipe
from sparkserve.settings import nearest_name


def templates_dir() -> Path:
    """Find the shipped templates: inside the installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "templates"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "templates"


def shipped_names() -> list[str]:
    """List the recipes that came with sparkserve."""
    # What begins with _ is only there to be extended.
    return sorted(path.parent.name for path in (templates_dir() / "recipes").glob("[!_]*/recipe.toml"))


def find_directory(name: str) -> Path:
    """Find a recipe by name, or by path when it holds a slash or a dot in front."""
    if "/" in name or name.startswith((".", "~")):
        directory = Path(name).expanduser()
    else:
        directory = templates_dir() / "recipes" / name
    if not (directory / "recipe.toml").is_file():
        near = nearest_name(name, shipped_names())
        raise usage_error(
            "recipe_unknown", f"no recipe {name}{near}", "`sparkserve recipes` lists them; a path works too"
        )
    return directory


def load_recipe(name: str) -> Recipe:
    """Read and check a recipe; raise with every problem found."""
    table, directories = _read(find_directory(name), [])
    try:
        return Recipe.model_validate({**table, "directories": directories})
    except ValidationError as error:
        raise Failures([_explain(problem, name) for problem in error.errors(include_input=False)]) from error


def _read(directory: Path, seen: list[Path]) -> tuple[dict[str, Any], list[Path]]:
    if directory.resolve() in seen:
        raise usage_error("recipe_invalid", f"recipe {directory} extends itself", f"look at `extends` in {directory}")
    path = directory / "recipe.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise usage_error("recipe_invalid", f"{path}: {error}", "docs/recipes.md explains the format") from error
    parent = table.pop("extends", None)
    if parent is None:
        return table, [directory]
    if not isinstance(parent, str):
        message = f"{path}: `extends` should be the name or path of a recipe"
        raise usage_error("recipe_invalid", message, "`sparkserve recipes` shows the names")
    beside = directory.parent / parent
    where = beside if (beside / "recipe.toml").is_file() else find_directory(parent)
    base, directories = _read(where, [*seen, directory.resolve()])
    return _merge(base, table), [directory, *directories]


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one table over another: tables merge key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_tables else value
    return merged


def _explain(problem: Any, name: str) -> SparkserveError:  # noqa: ANN401 - pydantic's own typed dict
    location = [str(part) for part in problem["loc"]]
    text = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        text = f"unknown key{nearest_name(location[-1], _known_keys(Recipe, location[:-1]))}"
    where = ".".join(location) or "recipe"
    return usage_error("recipe_invalid", f"recipe {name}: {where}: {text}", "docs/recipes.md explains the keys")


def _known_keys(model: type[BaseModel], location: list[str]) -> list[str]:
    for part in location:
        for name, field in model.model_fields.items():
            if part == (field.alias or name):
                found = list(models_in(field.annotation))
                model = found[0] if found else model
    return [field.alias or name for name, field in model.model_fields.items()]


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:  # noqa: ANN401 - a type expression
    """List the models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from models_in(argument)


def write_skeleton(directory: Path, *, dry_run: bool = False) -> Path:
    """Write a commented recipe that passes its check, named after its directory; a dry run only refuses."""
    name = directory.resolve().name
    path = directory / "recipe.toml"
    if path.exists():
        raise usage_error("recipe_exists", f"{path} is there already", "name a new directory")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        hint = "small letters, digits, dots and hyphens make a name"
        raise usage_error("recipe_name", f"{name} cannot be the name of a recipe", hint)
    if dry_run:
        return path
    directory.mkdir(parents=True, exist_ok=True)
    text = (templates_dir() / "new-recipe" / "recipe.toml").read_text(encoding="utf-8")
    path.write_text(text.replace('name = "new-recipe"', f'name = "{name}"'), encoding="utf-8")
    return path
