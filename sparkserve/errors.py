"""The one error that users see: what happened, where, and what to type next."""

from __future__ import annotations

from dataclasses import dataclass

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_READY = 3
EXIT_CHANGES = 4
EXIT_NOT_RUNNING = 5
EXIT_COULD_NOT_LOOK = 6
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


@dataclass
class SparkserveError(Exception):
    """A failure that is not our bug; `code` is stable and documented, `details` holds other programs' words."""

    code: str
    message: str
    hint: str = ""
    node: str = ""
    details: str = ""
    exit_code: int = EXIT_FAILED

    def __str__(self) -> str:
        return f"{self.node}: {self.message}" if self.node else self.message


class Failures(SparkserveError):
    """Several failures told together, such as those of both nodes or all bad settings."""

    def __init__(self, errors: list[SparkserveError]) -> None:
        first = errors[0]
        message = first.message if len(errors) == 1 else f"{len(errors)} problems"
        super().__init__(first.code, message, first.hint, first.node, first.details, max_exit(errors))
        self.errors = errors


def max_exit(errors: list[SparkserveError]) -> int:
    """Give the exit code of the first error; "could not look" outranks the rest, since then nothing is known."""
    if any(error.exit_code == EXIT_COULD_NOT_LOOK for error in errors):
        return EXIT_COULD_NOT_LOOK
    return errors[0].exit_code


def flatten(error: SparkserveError) -> list[SparkserveError]:
    """List the single errors inside `error`, in the order in which they were found."""
    if isinstance(error, Failures):
        return [single for inner in error.errors for single in flatten(inner)]
    return [error]


def usage_error(code: str, message: str, hint: str = "") -> SparkserveError:
    """Build an error of the command line or the settings (exit code 2)."""
    return SparkserveError(code, message, hint, exit_code=EXIT_USAGE)
