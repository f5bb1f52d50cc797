"""The commands of the first day: init, key, connect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkserve.command_line import Common, DryRun, Recipe, command, session

if TYPE_CHECKING:
    from sparkserve.setup import Setup, Wish

key = typer.Typer(help="Make the key that API clients must send.", rich_markup_mode=None, no_args_is_help=True)


@command("sparkserve init; sparkserve init spark@192.168.1.22; sparkserve init spark-2 --yes")
def init(  # noqa: PLR0913 - one for each option
    common: Common,
    worker: Annotated[str | None, typer.Argument(metavar="WORKER", help="The worker, as ssh reaches it.")] = None,
    *,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="Recipe name or directory.")] = None,
    models_dir: Annotated[str | None, typer.Option("--models-dir", help="Directory of the weights.")] = None,
    head_link: Annotated[str | None, typer.Option("--head-link", help="The head's address on the cable.")] = None,
    worker_link: Annotated[str | None, typer.Option("--worker-link", help="The worker's address there.")] = None,
    accept_host_key: Annotated[
        str | None, typer.Option("--accept-host-key", metavar="SHA256:…", help="Trust this very host key.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Take what is proposed, without asking.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a settings file that is there.")] = False,
    from_running: Annotated[
        bool, typer.Option("--from-running", help="Make the recipe of the pair that runs, started by your own script.")
    ] = False,
    recipe_dir: Annotated[Path, typer.Option("--recipe-dir", help="Where --from-running writes it.")] = Path("recipe"),
    dry_run: DryRun = False,
) -> None:
    """Look at both nodes and write the settings.

    It asks for the worker, shows its host key once, looks at both nodes, and writes `.env` with what it found: the
    addresses on the cable, directories with room, the recipe. Every question has a default; nothing else is changed.
    --from-running reads the two containers of a pair that your own script started, and writes the recipe that makes the
    same two: image, arguments, environment, files where they lie. Secrets go to a file of their own (mode 0600).
    """
    from sparkserve import setup, setup_tables
    from sparkserve.settings import process_environment

    output = common.output
    output.takes_defaults = yes
    flags = {"worker": worker, "recipe": recipe, "models_dir": models_dir}
    flags |= {"head_link": head_link, "worker_link": worker_link}
    environment = process_environment()
    wish = setup.Wish(common.env_file, flags, environment, accept_host_key, force, from_running, dry_run)
    with setup.init(wish, output, lambda seen: output.show(setup_tables.seen_table(seen))) as found:
        data, views, hint = _conclude(common, wish, found, recipe_dir)
    output.result("init", {**setup_tables.setup_data(found), **data}, *views)
    for note in found.notes:
        output.warn(note)
    output.say(f"hint: sparkserve {hint}")


def _conclude(common: Common, wish: Wish, found: Setup, recipe_dir: Path) -> tuple[dict[str, Any], list[Any], str]:
    """Do what is left once both nodes were seen: what it adds to the data, what is shown, and what to type next."""
    from sparkserve import doctor, doctor_tables, setup_tables, takeover_story
    from sparkserve.tables import value_table

    data: dict[str, Any] = {}
    taken = None
    if wish.from_running:
        taken = takeover_story.take_over(found, recipe_dir, force=wish.force, dry_run=wish.dry_run)
        found.notes += taken.notes
        data["taken_over"] = taken
    if wish.dry_run:
        return data, setup_tables.planned_view(found, taken), "init --from-running" if taken else "init"
    views: list[Any] = [value_table(found.values, caption=f"written to {found.env_file}")]
    views += setup_tables.taken_view(taken) if taken else []
    report = doctor.examine(session(common, "init", common.output), found.cluster)
    data["doctor"] = doctor_tables.report_data(report)
    hint = "plan --against-running" if wish.from_running else "doctor" if report.exit_code else "up --dry-run"
    return data, [*views, "", *doctor_tables.report_view(report)], hint


@command("sparkserve key new; sparkserve key new --set", key)
def new(
    common: Common,
    *,
    file: Annotated[Path | None, typer.Option("--file", help="Where; else `api-key` beside the settings file.")] = None,
    put: Annotated[bool, typer.Option("--set", help="Put its line into the settings file, too.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Make a key file (mode 0600) for the API.

    An API that others can reach needs one. With --set a key that is there is kept, and only its line is put.
    The key is not shown; `sparkserve connect --show-key` does that.
    """
    from sparkserve import api_client, env_file
    from sparkserve.settings import read_secret, variable_name

    path = (file.expanduser() if file else common.env_file.with_name("api-key")).absolute()
    is_kept = put and path.exists()
    if put:
        env_file.read_text(common.env_file)  # no key is left behind for a file that cannot name it
    if is_kept:
        read_secret(path, "key of the API")
    else:
        api_client.make_key(path, dry_run=dry_run)
    line = f"{variable_name('api_key_file')}={path}"
    if put and not dry_run:
        env_file.set_line(common.env_file, "api_key_file", str(path))
    named = f", and {common.env_file} names it" if put else "; the line for .env:"
    data = {"path": path, "line": line, "set": put, "kept": is_kept, "dry_run": dry_run}
    shown = f"{path} is {'kept' if is_kept else 'written'}{named}"
    shown += "; it holds from the next `sparkserve start` on" * put
    if dry_run:
        shown = f"{path} would be {'kept' if is_kept else 'written'}{f', and {line} put into {common.env_file}' * put}"
    common.output.result("key", data, shown, *([] if put else [line]))


@command("sparkserve connect; sparkserve connect --show-key")
def connect(
    common: Common,
    *,
    show_key: Annotated[bool, typer.Option("--show-key", help="Show the API key itself.")] = False,
    recipe: Recipe = None,
) -> None:
    """Show what to type into an app.

    Base URL, model name, where the key is, a request for curl and for the OpenAI SDK, and the way from another machine.
    """
    from sparkserve import api_client, setup_tables
    from sparkserve.settings import read_secret

    run = session(common, "connect", common.output, recipe=recipe)
    found = api_client.describe_access(run.settings, run.recipe, *api_client.find_addresses(run.settings))
    key_text = read_secret(found.key_file, "key of the API").get_secret_value() if show_key and found.key_file else ""
    data = {**vars(found), **({"key": key_text} if key_text else {})}
    common.output.result("connect", data, *setup_tables.access_view(found, key_text))
