"""The one error that users see: what happened, where, and what to type next."""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_READY = 3
EXIT_CHANGES = 4
EXIT_NOT_RUNNING = 5
EXIT_COULD_NOT_LOOK = 6
EXIT_INTERRUPTED = 130
# What keeps a node from asking its Docker engine: what that means, and what to type there.
DOCKER_PROBLEMS = {
    "missing": (
        "there is no Docker engine: its socket is missing",
        "sudo systemctl start docker, or where it was never installed: sudo apt-get install docker.io",
    ),
    "refused": ("the Docker engine does not run", "sudo systemctl start docker"),
    "permission": (
        "this account may not use the Docker engine",
        "sudo usermod -aG docker $USER, then log in again",
    ),
    "timeout": (
        "the Docker engine gives no answer",
        "the machine may be overloaded: wait a minute, then look again",
    ),
    "failed": ("the Docker engine cannot be asked", "`docker version` on that node tells why"),
}

# A command of ours in a text; what names a settings file already is left alone.
_OURS = re.compile(
    r"\bsparkserve (?:(?:recipes|weights|service|key) [a-z]+|init|connect|doctor|config|lock|download|sync|template"
    r"|build|tune|start|up|verify|status|watch|stop|logs|history|diagnose|link|prune|plan)\b(?! -e | --env-file )"
)


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
    """Several failures told together, such as those of both nodes or all bad settings.

    `report` is set where a plan failed in part: what was done of it all the same (a `plan.ApplyReport`).
    """

    report: object = None

    def __init__(self, errors: list[SparkserveError]) -> None:
        first = errors[0]
        message = first.message if len(errors) == 1 else f"{len(errors)} problems"
        super().__init__(first.code, message, first.hint, first.node, first.details, max_exit(errors))
        self.errors = errors


def with_settings_file(text: str, env_file: str) -> str:
    """Put another settings file than `.env` into the commands of a text, and where it tells to write to `.env`."""
    if env_file == ".env":
        return text
    name = shlex.quote(env_file)
    text = _OURS.sub(lambda found: f"{found[0]} -e {name}", text)
    return re.sub(r"\b(in|to) \.env\b", lambda found: f"{found[1]} {name}", text)


def max_exit(errors: list[SparkserveError]) -> int:
    """Give the exit code of the first error; "could not look" outranks the rest, since then nothing is known."""
    if any(error.exit_code == EXIT_COULD_NOT_LOOK for error in errors):
        return EXIT_COULD_NOT_LOOK
    return errors[0].exit_code


def exit_code_of(proofs: Iterable[Any]) -> int:
    """Give the exit code of checks or proofs: a failed one outranks one that could not be looked at."""
    verdicts = {proof.verdict for proof in proofs}
    return EXIT_FAILED if "fail" in verdicts else EXIT_COULD_NOT_LOOK if "unseen" in verdicts else 0


def flatten(error: SparkserveError) -> list[SparkserveError]:
    """List the single errors inside `error`, in the order in which they were found."""
    if isinstance(error, Failures):
        return [single for inner in error.errors for single in flatten(inner)]
    return [error]


def docker_unreachable(answer: Mapping[str, Any], node: str, exit_code: int) -> SparkserveError:
    """Explain an answer of a node's Docker engine, as the node program gives it, that is none."""
    problem = str(answer.get("error") or "failed")
    observed, hint = DOCKER_PROBLEMS.get(problem, DOCKER_PROBLEMS["failed"])
    body = answer.get("body")
    details = str(body.get("message", "")) if isinstance(body, dict) else ""
    if "status" in answer:
        details = f"HTTP {answer['status']} {details}".strip()
    return SparkserveError("docker_unreachable", observed, hint, node, details, exit_code)


def disk_error(number: int | None, message: str, node: str, otherwise: str) -> SparkserveError:
    """Explain what a file system refused, by its errno; `otherwise` is the code where that one tells nothing."""
    hint = "look at the owner of that path and at `dmesg` there"
    if number in (errno.ENOSPC, errno.EDQUOT):
        advice = "free some space there, then run the same command again: what has arrived is kept"
        return SparkserveError("disk_full", f"no room left: {message}", advice, node)
    if number == errno.EACCES:
        advice = "look at the owner and mode of that path"
        return SparkserveError("permission_denied", f"no permission: {message}", advice, node)
    if number == errno.EROFS:
        advice = "look at how its file system is mounted"
        return SparkserveError("read_only", f"nothing can be written: {message}", advice, node)
    return SparkserveError(otherwise, message, hint, node)


def node_error(node: str, do: str, error: Mapping[str, Any]) -> SparkserveError:
    """Explain what the node program could not do."""
    if error["errno"] is None:
        hint = "sparkserve diagnose makes an archive for a bug report"
        return SparkserveError("node_failed", f"the node program failed in `{do}`: {error['text']}", hint, node)
    return disk_error(error["errno"], error["text"], node, "node_failed")


def usage_error(code: str, message: str, hint: str = "") -> SparkserveError:
    """Build an error of the command line or the settings (exit code 2)."""
    return SparkserveError(code, message, hint, exit_code=EXIT_USAGE)
