"""The commands about recipes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparkserve.command_line import Common, DryRun, command

if TYPE_CHECKING:
    from sparkserve.recipe import Recipe

recipes = typer.Typer(help="List, explain, check and make recipes.", rich_markup_mode=None, invoke_without_command=True)
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name, directory or git address of a recipe.")]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the recipe.")]


@recipes.callback()
def recipes_without_command(
    context: typer.Context,
    *,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """List, explain, check and make recipes; without a word it lists those that came with sparkserve."""
    if context.invoked_subcommand is not None:
        return
    from sparkserve import recipe_source, recipe_tables

    found = [recipe_source.load_recipe(name) for name in recipe_source.shipped_names()]
    names = {"name", "title", "engine", "system", "proven", "why"}
    rows = [recipe.model_dump(include=names) for recipe in found]
    Common(json=json).output.result("recipes", {"recipes": rows}, recipe_tables.recipes_table(found))


@command("sparkserve recipes show tensorfold-1017", recipes)
def show(common: Common, name: Name) -> None:
    """Explain a recipe.

    Its sources, image, memory and ports, the arguments of both ranks, and what is not proved.
    """
    from sparkserve import lifecycle
    from sparkserve.settings import process_environment

    _show(common, lifecycle.find_recipe(name, process_environment()))


def _show(common: Common, recipe: Recipe, *, whole: bool = False) -> None:
    from sparkserve import recipe_check, recipe_tables

    drawn = recipe_check.draw_open(recipe)
    data = {"recipe": recipe, **recipe_tables.blueprint_data(drawn, recipe)}
    more = recipe_tables.reach_view(recipe, drawn) if whole else ()
    common.output.result("recipes", data, *recipe_tables.recipe_view(recipe, drawn), *more)


@command("sparkserve recipes check ./my-recipe", recipes)
def check(common: Common, directory: Directory) -> int:
    """Prove a new recipe without hardware.

    The keys, both ranks' commands, ports, flags given twice, mounts, the memory budget, parameters that reach no
    argument, what the Dockerfile uses, and arguments that are JSON.
    """
    from sparkserve import recipe_check, recipe_source, recipe_tables

    found = recipe_source.load_recipe(str(directory.resolve()))
    findings, drawn = recipe_check.check_recipe(found)
    shown = recipe_tables.blueprint_view(drawn, found) if drawn else []
    data = {"findings": findings, **(recipe_tables.blueprint_data(drawn, found) if drawn else {})}
    code = 1 if any(item.problem for item in findings) else 0
    return common.output.result("recipes", data, recipe_tables.findings_table(findings), *shown, exit_code=code)


@command("sparkserve recipes new ./my-recipe", recipes)
def new(common: Common, directory: Directory, *, dry_run: DryRun = False) -> None:
    """Write a commented recipe to start from."""
    from sparkserve import recipe_source

    path = recipe_source.write_skeleton(directory, dry_run=dry_run)
    text = f"{path} is written; change it, then `sparkserve recipes check {directory}`"
    shown = f"{path} would be written" if dry_run else text
    common.output.result("recipes", {"path": path, "dry_run": dry_run}, shown)


@command("sparkserve recipes add git+https://example.org/recipes.git@0123456789abcdef0123456789abcdef01234567", recipes)
def add(
    common: Common,
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="git+https://HOST/REPOSITORY@COMMIT#DIRECTORY")],
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Trust it without being asked.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Fetch a recipe from git, show it, and trust that commit.

    From then on SPARKSERVE_RECIPE and --recipe take its address. A recipe cannot run anything on the hosts outside of
    its containers, which get the GPUs and the network.
    """
    import tempfile

    from sparkserve import recipe_git
    from sparkserve.settings import process_environment, state_dir

    state = state_dir(process_environment())
    with tempfile.TemporaryDirectory() if dry_run else nullcontext(state) as place:
        found = recipe_git.fetch(address, Path(place))
        _show(common, found, whole=True)
    if dry_run:
        common.output.say("nothing was kept, and nothing is trusted")
    elif yes or common.output.ask(f"Trust {found.name} at this commit?"):
        recipe_git.trust(address, state)
