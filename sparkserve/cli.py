"""The command line: a command loads, makes one lifecycle call and one output call; `main` maps errors to exit codes."""

from __future__ import annotations

import functools
import inspect
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.exceptions import TyperException

from sparkserve import __version__
from sparkserve.errors import EXIT_FAILED, EXIT_TERMINATED, EXIT_USAGE, SparkserveError
from sparkserve.output import Mode, Output

if TYPE_CHECKING:
    from sparkserve.lifecycle import Session

app = typer.Typer(
    name="sparkserve",
    help="Serve one large model across two NVIDIA DGX Spark as one OpenAI-compatible endpoint, and prove every step.",
    epilog="Start here: sparkserve up --dry-run",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is, with its own exit code."""

    exit_code = EXIT_TERMINATED


@dataclass(frozen=True)
class Common:
    """The options that every command has."""

    env_file: Path = Path(".env")
    json: bool = False
    quiet: bool = False
    verbose: bool = False

    @property
    def output(self) -> Output:
        """The one output of this command."""
        return Output(Mode.JSON if self.json else Mode.QUIET if self.quiet else Mode.HUMAN)


_COMMON = {
    "env_file": Annotated[Path, typer.Option("--env-file", "-e", help="Settings file.", show_default=True)],
    "json": Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Only errors.")],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="Every command that runs, on stderr.")],
}
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and touch nothing.")]
Check = Annotated[bool, typer.Option("--check", help="As --dry-run, but exit 4 when something would change.")]
Recipe = Annotated[str | None, typer.Option("--recipe", "-r", help="Recipe name or directory, for this run.")]


def command(examples: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a command: it gets `common` as one value, the user gets its options one by one."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = [item for item in inspect.signature(function, eval_str=True).parameters.values() if item.name != "common"]
        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter(name, keyword, default=getattr(Common, name), annotation=annotation)
            for name, annotation in _COMMON.items()
        ]

        name = function.__name__.strip("_").replace("_", "-")

        @functools.wraps(function)
        def run(**values: Any) -> Any:  # noqa: ANN401 - what the command line gave
            common = Common(**{name: values.pop(name) for name in _COMMON})
            if common.verbose:
                logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(name)s %(message)s")
                logging.getLogger("paramiko").setLevel(logging.WARNING)
            try:
                return function(common, **values)
            except KeyboardInterrupt as error:  # Typer would end the program without a word of ours
                raise _interrupted(name, error) from error

        parameters = [item.replace(kind=keyword) for item in own] + shared
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        app.command(name, epilog=f"Examples: {examples}")(run)
        return run

    return decorate


def session(common: Common, name: str, output: Output, **flags: object) -> Session:
    """Read settings and recipe for a command."""
    from sparkserve.lifecycle import open_session
    from sparkserve.settings import process_environment

    return open_session(name, common.env_file, process_environment(), flags, output)


@command("sparkserve config; sparkserve config --json")
def config(common: Common) -> None:
    """Show every setting, its value and its source."""
    from sparkserve import tables
    from sparkserve.settings import load, process_environment

    output = common.output
    rows = tables.config_rows(load(common.env_file, process_environment(), {}))
    output.result("config", {"settings": rows}, tables.config_table(rows))


@command("sparkserve lock; sparkserve lock --update")
def lock(
    common: Common,
    *,
    update: Annotated[bool, typer.Option("--update", help="Resolve the sources anew.")] = False,
    dry_run: DryRun = False,
    recipe: Recipe = None,
) -> None:
    """Resolve all sources to commits and hashes.

    Everything after it works from the lock file beside `.env`, without asking what a branch or a tag means today.
    """
    from sparkserve import lifecycle, tables

    output = common.output
    found = lifecycle.lock_sources(session(common, "lock", output, recipe=recipe), update=update, dry_run=dry_run)
    output.result("lock", found, tables.lock_table(found))


def _run_steps(common: Common, name: str, steps: tuple[str, ...], *, preview: str = "", recipe: str | None) -> None:
    from sparkserve import lifecycle, tables

    output = common.output
    run = session(common, name, output, recipe=recipe)
    outcome = lifecycle.run_steps(run, steps, dry_run=bool(preview))
    code = 4 if preview == "check" and not outcome.plan.is_empty else 0
    output.result(
        name, tables.outcome_data(outcome), tables.outcome_view(outcome, preview=bool(preview)), exit_code=code
    )
    raise typer.Exit(code)


def _preview(*, dry_run: bool, check: bool) -> str:
    return "check" if check else "dry-run" if dry_run else ""


@command("sparkserve download --dry-run; SPARKSERVE_RATE_LIMIT=40MB sparkserve download")
def download(common: Common, *, dry_run: DryRun = False, check: Check = False, recipe: Recipe = None) -> None:
    """Fetch the weights to both nodes, proved by hash.

    A file goes to the worker as soon as it is proved on the head. It can be interrupted at any time and goes on there.
    """
    _run_steps(common, "download", ("download", "sync"), preview=_preview(dry_run=dry_run, check=check), recipe=recipe)


@command("sparkserve sync; sparkserve sync --check")
def sync(common: Common, *, dry_run: DryRun = False, check: Check = False, recipe: Recipe = None) -> None:
    """Copy weights to the worker and prove them there."""
    _run_steps(common, "sync", ("sync",), preview=_preview(dry_run=dry_run, check=check), recipe=recipe)


@command("sparkserve template")
def template(common: Common, *, dry_run: DryRun = False, check: Check = False, recipe: Recipe = None) -> None:
    """Prepare the chat template on both nodes.

    It is fetched at a pinned hash, the recipe's defaults are put in front, and it must render.
    """
    _run_steps(common, "template", ("template",), preview=_preview(dry_run=dry_run, check=check), recipe=recipe)


@command("sparkserve build; sparkserve build --dry-run")
def build(common: Common, *, dry_run: DryRun = False, check: Check = False, recipe: Recipe = None) -> None:
    """Build the engine image and ship it.

    What is in the image is proved before it goes to the worker; a recipe may name a finished image instead.
    """
    _run_steps(common, "build", ("build", "ship"), preview=_preview(dry_run=dry_run, check=check), recipe=recipe)


@command("sparkserve tune; sparkserve tune --undo")
def tune(
    common: Common,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Put the old values back.")] = False,
    dry_run: DryRun = False,
    check: Check = False,
    recipe: Recipe = None,
) -> None:
    """Set host memory settings; --undo puts them back."""
    from sparkserve import lifecycle, tables

    if not undo:
        _run_steps(common, "tune", ("tune",), preview=_preview(dry_run=dry_run, check=check), recipe=recipe)
    output = common.output
    rows = lifecycle.undo_tuning(session(common, "tune", output, recipe=recipe), dry_run=dry_run or check)
    output.result("tune", {"undone": rows}, tables.pair_table("put back", rows))


@command("sparkserve start; sparkserve start --dry-run")
def start(common: Common, *, dry_run: DryRun = False, check: Check = False, recipe: Recipe = None) -> None:
    """Start the engine on both nodes until it answers."""
    _run_steps(common, "start", ("start",), preview=_preview(dry_run=dry_run, check=check), recipe=recipe)


@command("sparkserve up --dry-run; sparkserve up; sparkserve up --skip tune")
def up(
    common: Common,
    *,
    dry_run: DryRun = False,
    check: Check = False,
    recipe: Recipe = None,
    skip: Annotated[list[str] | None, typer.Option("--skip", help="Leave a step out: tune.")] = None,
) -> None:
    """Do all that is still to be done, then verify.

    From the first byte to a proved answer: lock, download, sync, template, build, ship, tune, start, verify.
    """
    from sparkserve import lifecycle, tables

    output = common.output
    run = session(common, "up", output, recipe=recipe)
    preview = _preview(dry_run=dry_run, check=check)
    outcome, proofs = lifecycle.up(run, skip=tuple(skip or ()), dry_run=bool(preview))
    code = 4 if preview == "check" and not outcome.plan.is_empty else tables.proofs_exit_code(proofs)
    data = {**tables.outcome_data(outcome), "proofs": proofs}
    views = [tables.outcome_view(outcome, preview=bool(preview)), *([tables.proofs_table(proofs)] if proofs else [])]
    output.result("up", data, *views, exit_code=code)
    raise typer.Exit(code)


@command("sparkserve verify; sparkserve verify --json")
def verify(common: Common, *, recipe: Recipe = None) -> None:
    """Prove the endpoint by real requests."""
    from sparkserve import lifecycle, tables

    output = common.output
    proofs = lifecycle.verify_endpoint(session(common, "verify", output, recipe=recipe))
    code = tables.proofs_exit_code(proofs)
    output.result("verify", {"proofs": proofs}, tables.proofs_table(proofs), exit_code=code)
    raise typer.Exit(code)


@command("sparkserve status; sparkserve status --json")
def status(common: Common, *, recipe: Recipe = None) -> None:
    """Tell what the pair does, without disturbing it."""
    from sparkserve import lifecycle, tables

    output = common.output
    found = lifecycle.look(session(common, "status", output, recipe=recipe))
    code = found.verdict.exit_code
    output.result("status", found.data(), *tables.status_view(found), exit_code=code)
    raise typer.Exit(code)


@command("sparkserve stop; sparkserve stop --force")
def stop(
    common: Common,
    *,
    force: Annotated[bool, typer.Option("--force", help="Kill ranks at once.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Stop both ranks; prove that nothing is left."""
    from sparkserve import lifecycle, tables

    output = common.output
    outcome = lifecycle.stop(session(common, "stop", output), force=force, dry_run=dry_run)
    empty = "nothing of ours was running"
    view = empty if outcome.plan.is_empty else tables.outcome_view(outcome, preview=dry_run)
    output.result("stop", tables.outcome_data(outcome), view)


@command("sparkserve logs --rank 1; sparkserve logs --follow --grep ERROR")
def logs(
    common: Common,
    *,
    rank: Annotated[int | None, typer.Option("--rank", min=0, max=1, help="Only this rank.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on; Ctrl-C only detaches.")] = False,
    since: Annotated[str, typer.Option("--since", help="Only lines of the last 30s, 10m, 2h.")] = "",
    grep: Annotated[str, typer.Option("--grep", help="Only lines that match this regular expression.")] = "",
) -> None:
    """Show both ranks' logs, interleaved by time."""
    from sparkserve import lifecycle
    from sparkserve.engine_logs import LogQuery

    output = common.output
    run = session(common, "logs", output)
    query = LogQuery(rank, parse_seconds(since), grep=grep, follow=follow, secrets=(run.settings.hf_token,))
    output.lines("logs", lifecycle.read_logs(run, query), lambda line: f"rank {line.rank}  {line.text}")


@command("sparkserve recipes")
def recipes(common: Common) -> None:
    """List the recipes that came with sparkserve."""
    from sparkserve import recipe_source, tables

    rows = [recipe_source.load_recipe(name) for name in recipe_source.shipped_names()]
    common.output.result("recipes", {"recipes": tables.recipe_rows(rows)}, tables.recipes_table(rows))


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


def parse_seconds(text: str) -> float | None:
    """Read `30s`, `10m`, `2h` or plain seconds."""
    if not text:
        return None
    number, unit = (text[:-1], text[-1]) if text[-1].isalpha() else (text, "s")
    factors = {"s": 1, "m": 60, "h": 3600}
    if unit not in factors or not number.replace(".", "", 1).isdigit():
        raise SparkserveError("usage", f"--since {text}: should be like 30s, 10m or 2h", exit_code=EXIT_USAGE)
    return float(number) * factors[unit]


def _terminate(number: int, frame: FrameType | None) -> None:
    del number, frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(_run(words))


def _run(words: list[str]) -> int:
    """Run one command line; every failure becomes an exit code and, for `--json`, one object on stdout."""
    name = next((word for word in words if not word.startswith("-")), "sparkserve")
    output = Output(Mode.JSON if "--json" in words else Mode.HUMAN)
    try:
        code = app(args=words, standalone_mode=False)
    except SparkserveError as error:
        output.error(name, error)
        return error.exit_code
    except TyperException as error:
        known = any(item.name == name for item in app.registered_commands)
        hint = f"sparkserve {name} --help" if known else "sparkserve --help"
        output.error(name, SparkserveError("usage", str(error), hint, exit_code=EXIT_USAGE))
        return EXIT_USAGE
    except BrokenPipeError:
        return EXIT_FAILED
    except Exception as error:  # noqa: BLE001 - the top: anything else is a bug of ours, and goes to the log
        from sparkserve.bug_report import write_bug_report

        output.error(name, *write_bug_report(error, words))
        return EXIT_FAILED
    return int(code or 0)


def _interrupted(name: str, error: KeyboardInterrupt) -> SparkserveError:
    code = int(getattr(error, "exit_code", 130))
    report = getattr(error, "report", None)
    done = f"; {len(report.applied)} changes are done and proved" if report is not None else ""
    hint = f"`sparkserve {name}` goes on where it ended" if report is not None else ""
    return SparkserveError("interrupted", f"interrupted{done}", hint, exit_code=code)
