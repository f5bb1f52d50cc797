"""The command line: a command loads, makes one lifecycle call and one output call; `main` maps errors to exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from sparkserve import __version__, cli_doctor, cli_operate, cli_recipes, cli_setup, signals
from sparkserve.command_line import Common, DryRun, Recipe, SkipCheck, Writing, app, command, interrupted, session
from sparkserve.errors import EXIT_CHANGES, EXIT_FAILED, EXIT_USAGE, SparkserveError, exit_code_of
from sparkserve.output import Mode, Output, end_streams, open_streams

__all__ = ["app", "cli_doctor", "main"]

# In which help lists the commands.
_ORDER = (
    *("init", "connect", "doctor", "config", "lock", "download", "sync", "template", "build", "tune", "start", "up"),
    *("verify", "status", "watch", "stop", "logs", "history", "diagnose", "link", "prune", "plan"),
)

app.add_typer(cli_recipes.recipes, name="recipes")
app.add_typer(cli_operate.weights, name="weights")
app.add_typer(cli_operate.service, name="service")
app.add_typer(cli_setup.key, name="key")


@command("sparkserve config; sparkserve config --json")
def config(common: Common) -> None:
    """Show every setting, its value and its source."""
    from sparkserve import lifecycle, tables
    from sparkserve.settings import load, process_environment

    output, environment, recipe = common.output, process_environment(), None
    loaded = load(common.env_file, environment, {})
    try:
        recipe = lifecycle.find_recipe(loaded.settings.recipe, environment)
    except SparkserveError as error:
        output.warn(f"{error}; what the recipe decides is not shown")
    rows = tables.config_rows(loaded, recipe)
    output.result("config", {"settings": rows}, tables.config_table(rows))


@command("sparkserve lock; sparkserve lock --update; sparkserve lock --check")
def lock(
    common: Writing,
    *,
    update: Annotated[bool, typer.Option("--update", help="Resolve the sources anew, and tell what changed.")] = False,
) -> None:
    """Resolve all sources to commits and hashes.

    Everything after it works from the lock file beside `.env`, without asking what a branch or a tag means today.
    --check compares the lock with the sources as they are now, the hub's files by their hashes.
    """
    from sparkserve import lifecycle, tables, weights_tables

    output, check = common.output, common.check
    run = session(common, "lock", output, recipe=common.recipe)
    found = lifecycle.lock_sources(run, update=update or check, dry_run=common.is_preview)
    views = [weights_tables.differences_table(found.differences)] if update or check else []
    code = EXIT_CHANGES if check and found.differences else 0
    output.result("lock", found, tables.lock_table(found), *views, exit_code=code)
    raise typer.Exit(code)


def _run_steps(common: Writing, steps: tuple[str, ...], adopt: Sequence[str] = (), **flags: object) -> None:
    """Run the steps of a command, which has the name of its first one, or of a start that takes more."""
    from sparkserve import lifecycle, tables

    output, name = common.output, "start" if "start" in steps else steps[0]
    run = session(common, name, output, recipe=common.recipe, **flags)
    outcome = lifecycle.run_steps(run, steps, dry_run=common.is_preview, adopt=adopt)
    code = EXIT_CHANGES if common.check and not outcome.plan.is_empty else 0
    view = tables.outcome_view(outcome, preview=common.is_preview)
    output.result(name, tables.outcome_data(outcome), view, exit_code=code)
    raise typer.Exit(code)


@command("sparkserve download --dry-run; sparkserve download --adopt ~/.cache/huggingface/hub")
def download(
    common: Writing,
    *,
    adopt: Annotated[
        list[str] | None,
        typer.Option("--adopt", metavar="DIR", help="Use files of DIR, head:DIR or worker:DIR in place."),
    ] = None,
) -> None:
    """Fetch the weights to both nodes, proved by hash.

    A file goes to the worker as soon as it is proved on the head. It can be interrupted at any time and goes on there.
    --adopt (again for more) takes a folder or a Hugging Face cache of yours: what is right there is used where it lies,
    and never written to, moved or removed.
    """
    _run_steps(common, ("download", "sync", "derive"), adopt or ())


@command("sparkserve sync; sparkserve sync --check")
def sync(common: Writing) -> None:
    """Copy weights to the worker and prove them there."""
    _run_steps(common, ("sync",))


@command("sparkserve template")
def template(common: Writing) -> None:
    """Prepare the chat template on both nodes.

    It is fetched at a pinned hash, the recipe's defaults are put in front, and it must render.
    """
    _run_steps(common, ("template",))


@command("sparkserve build; sparkserve build --dry-run; sparkserve build --no-cache --pull")
def build(
    common: Writing,
    *,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Build every step anew, also when it is there.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="Ask the registry for the base image again, and build.")] = False,
) -> None:
    """Build the engine image and ship it.

    What is in the image is proved before it goes to the worker, and only layers go that the worker lacks. A recipe may
    name a finished image instead, which --pull pulls again.
    """
    options = ("--no-cache",) * no_cache + ("--pull",) * pull
    _run_steps(common, ("build", "ship"), build_options=options)


@command("sparkserve tune; sparkserve tune --undo")
def tune(
    common: Writing,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Put the old values back.")] = False,
) -> None:
    """Set host memory settings; --undo puts them back."""
    from sparkserve import lifecycle, tables

    if not undo:
        _run_steps(common, ("tune",))
    output = common.output
    rows = lifecycle.undo_tuning(session(common, "tune", output, recipe=common.recipe), dry_run=common.is_preview)
    output.result("tune", {"undone": rows}, tables.value_table(rows, "node", "put back"))


@command("sparkserve start; sparkserve start --dry-run; sparkserve start --recipe ./other")
def start(common: Writing, *, skip_check: SkipCheck = None) -> None:
    """Start the engine on both nodes until it answers.

    With another recipe than the one that serves, everything of it is made ready before the pair is stopped; if it does
    not answer, the pair that did is brought back.
    """
    from sparkserve import operations

    steps = operations.start_steps(session(common, "start", common.output, recipe=common.recipe))
    _run_steps(common, steps, skip_check=skip_check)


@command("sparkserve up --dry-run; sparkserve up; sparkserve up --skip tune")
def up(
    common: Writing,
    *,
    skip: Annotated[list[str] | None, typer.Option("--skip", help="Leave a step out: tune.")] = None,
    skip_check: SkipCheck = None,
) -> None:
    """Do all that is still to be done, then verify.

    From the first byte to a proved answer: lock, download, sync, template, build, ship, tune, start, verify.
    """
    from sparkserve import lifecycle, tables

    output = common.output
    run = session(common, "up", output, recipe=common.recipe, skip_check=skip_check)
    outcome, proofs = lifecycle.up(run, skip=tuple(skip or ()), dry_run=common.is_preview)
    code = EXIT_CHANGES if common.check and not outcome.plan.is_empty else exit_code_of(proofs)
    data = {**tables.outcome_data(outcome), "proofs": proofs}
    views = [tables.outcome_view(outcome, preview=common.is_preview)]
    views += [tables.proofs_table(proofs)] if proofs else []
    output.result("up", data, *views, exit_code=code)
    raise typer.Exit(code)


@command("sparkserve verify; sparkserve verify --json")
def verify(common: Common, *, recipe: Recipe = None) -> int:
    """Prove the endpoint by real requests."""
    from sparkserve import lifecycle, tables

    output = common.output
    proofs = lifecycle.verify_endpoint(session(common, "verify", output, recipe=recipe))
    code = exit_code_of(proofs)
    return output.result("verify", {"proofs": proofs}, tables.proofs_table(proofs), exit_code=code)


@command("sparkserve prune --dry-run; sparkserve prune --yes; sparkserve prune --build-cache")
def prune(
    common: Common,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without being asked.")] = False,
    build_cache: Annotated[bool, typer.Option("--build-cache", help="Docker's build cache too, all of it.")] = False,
    dry_run: DryRun = False,
    recipe: Recipe = None,
) -> None:
    """Remove what neither a lock beside .env nor a container uses.

    Weights of other commits, partial files, rank and compile caches, engine images, saved logs: only what sparkserve
    made. Adopted files, files of others, and what a container has mounted are never touched.
    """
    from sparkserve import lifecycle, storage, tables

    output = common.output

    def confirm(outcome: lifecycle.Outcome) -> bool:
        if not yes:
            output.show(tables.outcome_view(outcome, preview=True))
        return yes or output.ask("Remove all of this?")

    run = session(common, "prune", output, recipe=recipe)
    found = storage.prune_storage(run, confirm, dry_run=dry_run, build_cache=build_cache)
    view = "nothing to remove" if found.plan.is_empty else tables.outcome_view(found, preview=not found.report.applied)
    output.result("prune", tables.outcome_data(found), view)


@command("sparkserve plan; sparkserve plan --live --json; sparkserve plan --against-running")
def plan(
    common: Common,
    *,
    facts: Annotated[Path | None, typer.Option("--facts", help="Facts of another time, as --live keeps them.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Look at both nodes first.")] = False,
    against_running: Annotated[
        bool,
        typer.Option("--against-running", help="Show how the pair that runs differs; exit 4 where nobody knows why."),
    ] = False,
    recipe: Recipe = None,
) -> int:
    """Show the exact container command of each rank.

    It asks no node and no network: what was last seen of the nodes is used, and what is not known is a named place.
    --against-running looks at the pair that serves now, ours or one that a script of yours started.
    """
    from sparkserve import lifecycle, recipe_tables

    output = common.output
    run = session(common, "plan", output, recipe=recipe)
    if against_running:
        from sparkserve import setup_tables, takeover_story

        compared = takeover_story.compare_with_running(run)
        code = EXIT_CHANGES if compared.unexplained else 0
        data, view = setup_tables.differences_data(compared), setup_tables.differences_view(compared)
        return output.result("plan", data, view, exit_code=code)
    found = lifecycle.draw(run, facts, live=live)
    data = recipe_tables.blueprint_data(found, run.recipe)
    return output.result("plan", data, *recipe_tables.blueprint_view(found, run.recipe))


app.registered_commands.sort(key=lambda item: _ORDER.index(item.name or ""))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version.")] = False,
) -> None:
    """Serve one large model across two NVIDIA DGX Spark, and prove every step."""
    if version:
        print(f"sparkserve {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_USAGE)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    signals.watch()
    open_streams()
    try:
        code = _run(words)
    except OSError:  # nobody takes the error either
        code = EXIT_FAILED
    sys.exit(code if end_streams() else code or EXIT_FAILED)


def _done(error: BaseException) -> object:
    """Give what was done of a plan before it failed or was interrupted."""
    from sparkserve.plan import ApplyReport

    for one in (error, error.__cause__):
        if isinstance(report := getattr(one, "report", None), ApplyReport):
            from sparkserve.tables import report_data

            return report_data(report)
    return None


def _run(words: list[str]) -> int:
    """Run one command line; every failure becomes an exit code and, for `--json`, one object on stdout."""
    name = next((word for word in words if not word.startswith("-")), "sparkserve")
    output = Output(Mode.JSON if "--json" in words else Mode.HUMAN)
    try:
        code = app(args=words, standalone_mode=False)
    except SparkserveError as error:
        output.error(name, error, _done(error))
        return error.exit_code
    except TyperException as error:
        groups = [item.name for item in app.registered_groups]
        known = name in groups or any(item.name == name for item in app.registered_commands)
        hint = f"sparkserve {name} --help" if known else "sparkserve --help"
        output.error(name, SparkserveError("usage", error.format_message(), hint, exit_code=EXIT_USAGE))
        return EXIT_USAGE
    except (KeyboardInterrupt, typer.Abort) as error:
        stopped = interrupted(name, error)
        output.error(name, stopped, _done(error))
        return stopped.exit_code
    except BrokenPipeError:
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the top: anything else is a bug of ours, and goes to the log
        from sparkserve.bug_report import explain

        output.error(name, explain(error, words))
        return EXIT_FAILED
    return int(code or 0)
