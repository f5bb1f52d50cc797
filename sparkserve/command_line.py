"""What every command of the command line shares: its options, and how a function becomes a command."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparkserve import signals
from sparkserve.errors import SparkserveError, flatten, with_settings_file
from sparkserve.output import Mode, Output

if TYPE_CHECKING:
    from sparkserve.lifecycle import Session

app = typer.Typer(
    name="sparkserve",
    help="Serve one large model across two NVIDIA DGX Spark as one OpenAI-compatible endpoint, and prove every step.",
    epilog="Start here: sparkserve init",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


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
        mode = Mode.JSON if self.json else Mode.QUIET if self.quiet else Mode.HUMAN
        return Output(mode, str(self.env_file))


@dataclass(frozen=True)
class Writing(Common):
    """The options of a command that carries out a plan."""

    dry_run: bool = False
    check: bool = False
    recipe: str | None = None

    @property
    def is_preview(self) -> bool:
        """Whether nothing is to be touched."""
        return self.dry_run or self.check


def _recipe_names() -> list[str]:
    """List what completes `--recipe`."""
    from sparkserve.recipe_source import shipped_names

    return list(shipped_names())


DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and touch nothing.")]
Recipe = Annotated[
    str | None,
    typer.Option("--recipe", "-r", help="Recipe name or directory, for this run.", autocompletion=_recipe_names),
]
_SHARED = {
    "dry_run": DryRun,
    "check": Annotated[bool, typer.Option("--check", help="As --dry-run, but exit 4 when something would change.")],
    "recipe": Recipe,
    "env_file": Annotated[Path, typer.Option("--env-file", "-e", help="Settings file.", show_default=True)],
    "json": Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and errors.")],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="Every command that runs, on stderr.")],
}
SkipCheck = Annotated[
    list[str] | None,
    typer.Option("--skip-check", metavar="ID", help="Go on although this check fails; again for more."),
]


def command(examples: str, group: typer.Typer = app) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function a command: it gets `common` as one value, the user gets its options one by one."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = dict(inspect.signature(function, eval_str=True).parameters)
        kind = own.pop("common").annotation
        keyword = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter(name, keyword, default=getattr(kind, name), annotation=annotation)
            for name, annotation in _SHARED.items()
            if hasattr(kind, name)
        ]

        name = function.__name__.strip("_").replace("_", "-")

        @functools.wraps(function)
        def run(**values: Any) -> Any:  # noqa: ANN401 - what the command line gave
            common = kind(**{item.name: values.pop(item.name) for item in shared})
            if common.verbose:
                logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(name)s %(message)s")
                logging.getLogger("paramiko").setLevel(logging.WARNING)
            try:
                signals.begin()
                return function(common, **values)
            except KeyboardInterrupt as error:  # Typer would end the program without a word of ours
                raise _naming_settings(interrupted(name, error), common) from error
            except SparkserveError as error:
                raise _naming_settings(error, common)  # noqa: B904 - the same one

        parameters = [item.replace(kind=keyword) for item in own.values()] + shared
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        group.command(name, epilog=f"Examples: {examples}")(run)
        return run

    return decorate


def _naming_settings(error: SparkserveError, common: Common) -> SparkserveError:
    for one in flatten(error):
        one.hint = with_settings_file(one.hint, str(common.env_file))
    return error


def session(common: Common, name: str, output: Output, **flags: object) -> Session:
    """Read settings and recipe for a command."""
    from sparkserve.lifecycle import open_session
    from sparkserve.settings import process_environment

    return open_session(name, common.env_file, process_environment(), flags, output)


def interrupted(name: str, error: BaseException) -> SparkserveError:
    """Say what an interrupt left done, and that the same command goes on."""
    code = int(getattr(error, "exit_code", 130))
    report = getattr(error, "report", None)
    if report is None:
        return SparkserveError("interrupted", "interrupted", "the same command can be typed again", exit_code=code)
    from sparkserve.checks import show_size

    size = sum(item.change.size for item in report.applied)
    total = f" ({show_size(size)})" if size else ""
    message = f"interrupted; {len(report.applied)} changes are done and proved{total}"
    hint = f"`sparkserve {name}` goes on where it ended: what had arrived of the others is kept"
    return SparkserveError("interrupted", message, hint, exit_code=code)
