"""Recipes and their containers, for people and for programs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from sparkserve.blueprint import Blueprint
from sparkserve.checks import show_size
from sparkserve.docker_form import docker_run_argv
from sparkserve.progress import duration
from sparkserve.recipe import Recipe
from sparkserve.recipe_check import Finding
from sparkserve.tables import make_table, verdict_text


def recipes_table(recipes: Sequence[Recipe]) -> Table:
    """Show the recipes."""
    rows = ((recipe.name, recipe.engine, "yes" if recipe.proven else "no", recipe.title) for recipe in recipes)
    caption = "`sparkserve recipes show NAME` explains one"
    return make_table("recipe", "engine", "proven on Sparks", "what it serves", rows=rows, caption=caption)


def _disk_parts(recipe: Recipe) -> str:
    first, image = recipe.memory.first_start_disk_bytes, recipe.image.expected_bytes
    files = recipe.disk_bytes - first - image
    parts = {"weights and what is made of them": files, "image": image, "what the first start writes": first}
    return ", ".join(f"{name} {show_size(size)}" for name, size in parts.items() if size)


def recipe_view(recipe: Recipe, drawn: Blueprint) -> list[Table | str]:
    """Explain a recipe: sources, image, memory, ports, what is not proved, and both ranks' arguments."""
    proven = "proven on Sparks" if recipe.proven else "not proven on Sparks"
    lines = [f"{recipe.name}: {recipe.title}", f"{proven}: {recipe.why}"]
    lines += [f"follows: {recipe.system}"] if recipe.system else []
    lines += [f"warning: {text}" for text in recipe.warnings]
    memory, image = recipe.memory, recipe.image
    source = f" from {image.engine_repository} at {image.engine_revision}" if image.engine_repository else ""
    built = f"built on {image.base}{source}"
    pulled = image.reference or f"set SPARKSERVE_IMAGE; {image.reference_help}"
    cache = f" + cache {memory.kv_bytes / 2**30:.1f}" if memory.kv_bytes else ""
    lines += [
        f"licence: {recipe.licence}",
        f"image: {built if image.dockerfile else pulled} ({image.architecture})",
        f"memory of a node: {memory.required_gib:g} GiB available; weights {memory.weights_gib:g}{cache},"
        f" floor {memory.floor_gib:g}",
        f"disk of a node: {show_size(recipe.disk_bytes)}: {_disk_parts(recipe)}",
        f"ports: {recipe.ports}",
    ]
    rows = ((one.name, one.repository, one.revision, one.mount or "-") for one in recipe.weights)
    sources = make_table("weights", "repository", "at", "in the container", rows=rows)
    commands = (f"{spec.name}: {shlex.join((*spec.entrypoint, *spec.argv))}" for spec in drawn.specs.values())
    published = ((figure.name, f"{figure.value:,g} {figure.unit}", figure.source) for figure in recipe.figures)
    figures = make_table("published figure", "value", "source", rows=published)
    return ["\n".join(lines), sources, *commands, *([figures] if recipe.figures else [])]


def blueprint_data(found: Blueprint, recipe: Recipe) -> dict[str, Any]:
    """Give both ranks' containers for a program."""
    ranks = [
        {"rank": rank, "node": role, "argv": [*spec.entrypoint, *spec.argv], "env": dict(spec.env)}
        | {"command": docker_run_argv(spec), "unresolved": spec.unresolved}
        for rank, (role, spec) in enumerate(found.specs.items())
    ]
    facts = {"basis": found.basis, "age_seconds": found.age}
    return {"ranks": ranks, "facts": facts, "locked": found.locked, "warnings": recipe.warnings}


def blueprint_view(found: Blueprint, recipe: Recipe) -> list[str]:
    """Show both ranks' containers as commands that a shell understands."""
    age = "" if found.age is None else f", {duration(found.age)} old"
    lock = "the lock" if found.locked else "no lock yet: `sparkserve lock` resolves the sources"
    lines = [f"# recipe {recipe.name}; {found.basis}{age}; {lock}", *(f"# warning: {text}" for text in recipe.warnings)]
    for role, spec in found.specs.items():
        lines += ["", f"# {spec.name}, on the {role}"]
        lines += [f"# not known: {', '.join(spec.unresolved)}"] if spec.unresolved else []
        lines.append(" \\\n  ".join(shlex.quote(word) for word in docker_run_argv(spec)))
    return ["\n".join(lines)]


def reach_view(recipe: Recipe, drawn: Blueprint) -> list[str]:
    """Show all that a recipe of somebody else would do here: both containers whole, its Dockerfile, its sysctls."""
    name, sysctls = recipe.image.dockerfile, recipe.tuning.sysctl
    lines = [f"# {name}", recipe.file(name).decode(errors="replace")] if name else []
    lines += [f"# sysctl {key} = {value}, on both nodes" for key, value in sysctls.items()]
    return [*blueprint_view(drawn, recipe), "\n".join(lines)]


def findings_table(findings: Sequence[Finding]) -> Table:
    """Show what was looked at in a recipe."""
    rows = []
    for item in findings:
        verdict = verdict_text("fail" if item.problem else "ok")
        rows.append((item.what, verdict, item.problem or item.observed, item.hint if item.problem else ""))
    return make_table("checked", "verdict", "observed", "to do", rows=rows)
