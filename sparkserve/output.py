"""The only module that prints: stdout carries the result, stderr everything else; the mode is decided once."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sparkserve.errors import EXIT_INTERRUPTED, SparkserveError, flatten, with_settings_file

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from sparkserve.plan import Plan, Reporter

SCHEMA = 1
_PIPE_WIDTH = 5000


class Mode(StrEnum):
    """Who reads: a person, a program, or nobody."""

    HUMAN = "human"
    JSON = "json"
    QUIET = "quiet"


class Output:
    """Everything that a command says; commands that it tells to type name the settings file, if it is another."""

    def __init__(self, mode: Mode, env_file: str = ".env") -> None:
        self.mode = mode
        self._env_file = env_file
        self.takes_defaults = False
        self.is_live = mode is Mode.HUMAN and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"

    def _console(self, *, stderr: bool) -> Console:
        from rich.console import Console

        stream = sys.stderr if stderr else sys.stdout
        # A pipe has no width of its own: lines stay whole there, so that grep and awk can work on them.
        width = None if stream.isatty() else _PIPE_WIDTH
        return Console(stderr=stderr, width=width, soft_wrap=not stream.isatty(), emoji=False)

    @property
    def can_draw(self) -> bool:
        """Whether stdout takes characters that draw boxes."""
        try:
            "╞═╡".encode(sys.stdout.encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    @property
    def width(self) -> int | None:
        """The columns of stdout; None where it is no terminal."""
        return self._console(stderr=False).width if sys.stdout.isatty() else None

    def say(self, text: str) -> None:
        """Tell a person something on the way, on stderr."""
        if self.mode is Mode.HUMAN:
            print(with_settings_file(text, self._env_file), file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Warn, also a quiet caller."""
        if self.mode is not Mode.JSON:
            print(f"warning: {with_settings_file(text, self._env_file)}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def reporter(self, plan: Plan) -> Iterator[Reporter]:
        """Show a plan under way, in the way that suits the reader."""
        from sparkserve.progress import GroupReporter, LineReporter, live

        if self.mode is not Mode.HUMAN:
            yield GroupReporter(plan)
        elif self.is_live:
            with live(plan, self._console(stderr=True)) as reporter:
                yield reporter
        else:
            yield LineReporter(plan, self.say)

    def result(self, command: str, data: object, *shown: RenderableType | str, exit_code: int = 0) -> int:
        """Give the result, renderables for a person and one object for a program, and hand the exit code on."""
        if self.mode is Mode.JSON:
            _print_json(command, "ok" if exit_code == 0 else "failed", exit_code, to_plain(data), [])
        self.show(*shown)
        return exit_code

    def show(self, *shown: RenderableType | str) -> None:
        """Show something to a person, and only to one."""
        for item in shown if self.mode is Mode.HUMAN else ():
            if isinstance(item, str):
                print(with_settings_file(item, self._env_file))
            else:
                if isinstance(caption := getattr(item, "caption", None), str):
                    item.caption = with_settings_file(caption, self._env_file)  # type: ignore[union-attr]
                self._print(item)
            sys.stdout.flush()  # what is said next goes to stderr, and belongs below

    def _print(self, item: RenderableType) -> None:
        """Print a renderable; in a pipe without the blanks that fill its last column."""
        console = self._console(stderr=False)
        if sys.stdout.isatty():
            console.print(item)
            return
        with console.capture() as drawn:
            console.print(item)
        print("\n".join(line.rstrip() for line in drawn.get().splitlines()))

    def lines(self, command: str, items: Iterable[Any], show: Callable[[Any], str]) -> None:
        """Give a result that comes line by line; `--json` gathers it into the one object."""
        if self.mode is Mode.JSON:
            _print_json(command, "ok", 0, {"lines": [to_plain(item) for item in items]}, [])
            return
        for item in items:
            print(show(item), flush=True)

    def live(
        self, items: Iterable[Any], view: Callable[[Any], Sequence[RenderableType | str]], line: Callable[[Any], str]
    ) -> None:
        """Show a result that changes: in place on a terminal, one line each in a pipe."""
        if not sys.stdout.isatty():
            for item in items:
                print(line(item), flush=True)
            return
        from rich.console import Group
        from rich.live import Live

        with Live(console=self._console(stderr=False), auto_refresh=False) as screen:
            for item in items:
                screen.update(Group(*view(item)), refresh=True)

    def error(self, command: str, error: SparkserveError, data: object = None) -> None:
        """Say what failed, each single error with its node, its details and the next command."""
        singles = flatten(error)
        if self.mode is Mode.JSON:
            rows = [
                {"code": one.code, "node": one.node, "message": one.message, "hint": one.hint, "details": one.details}
                for one in singles
            ]
            _print_json(command, "failed", error.exit_code, to_plain(data), rows)
            return
        for one in singles:
            print(f"error: {one}", file=sys.stderr)
            for line in one.details.strip().splitlines():
                print(f"    {line}", file=sys.stderr)
            if one.hint:
                print(f"hint: {one.hint}", file=sys.stderr)
        sys.stderr.flush()

    @property
    def _has_person(self) -> bool:
        return sys.stdin.isatty() and self.mode is Mode.HUMAN

    def ask(self, question: str, flag: str = "--yes") -> bool:
        """Ask a person for a yes; anything else than a terminal is told which flag says it."""
        if not self._has_person:
            raise SparkserveError("needs_yes", f"{question} needs an answer", f"add {flag}", exit_code=2)
        return _read_answer(f"{question} [y/N] ").lower() in ("y", "yes")

    def ask_value(self, question: str, default: str, flag: str) -> str:
        """Ask a person for a value; where nobody is there the default stands, and no default is told the flag."""
        answer = default
        if self._has_person and not self.takes_defaults:
            answer = _read_answer(f"{question} [{default}]: " if default else f"{question}: ") or default
        if not answer:
            raise SparkserveError("needs_value", f"an answer is needed: {question}", f"add {flag}", exit_code=2)
        return answer

    def ask_secret(self, question: str) -> str | None:
        """Ask a person for a secret; None where nobody is there."""
        if not self._has_person:
            return None
        import getpass

        try:
            return getpass.getpass(f"{question}: ", stream=sys.stderr)
        except EOFError as error:
            raise _input_ended() from error


def _read_answer(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:  # Ctrl-D is no answer, not even the default
        print(file=sys.stderr, flush=True)
        raise _input_ended()
    return line.strip()


def _input_ended() -> SparkserveError:
    hint = "`--help` lists the options that answer for you"
    return SparkserveError("interrupted", "the input ended at a question", hint, exit_code=EXIT_INTERRUPTED)


def open_streams() -> None:
    """Open what the caller closed (`>&-`), lest the next file that is opened be taken for it.

    What the encoding of stdout cannot say is escaped there, as Python does on stderr.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - lives as long as we do
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def end_streams() -> bool:
    """Say whether all of the result was taken; what was not is let go, or Python's own last flush fails once more."""
    taken = []
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            taken.append(False)
    return all(taken)


def to_plain(data: Any) -> Any:  # noqa: ANN401 - anything that a result holds, to anything that JSON holds
    """Turn results into what JSON can hold; secrets have no way through, since they are not plain."""
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        shown = [field for field in dataclasses.fields(data) if field.repr]
        return {field.name: to_plain(getattr(data, field.name)) for field in shown}
    if hasattr(data, "model_dump"):
        return data.model_dump(mode="json", by_alias=True)
    if isinstance(data, Mapping):
        return {str(key): to_plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        return [to_plain(item) for item in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None  # JSON has no word for it
    return data if isinstance(data, (str, int, float, bool, type(None))) else str(data)


def _print_json(command: str, status: str, exit_code: int, data: object, errors: Sequence[object]) -> None:
    message = {
        "schema": SCHEMA,
        "command": command,
        "status": status,
        "exit_code": exit_code,
        "data": data,
        "errors": errors,
    }
    print(json.dumps(message), flush=True)
