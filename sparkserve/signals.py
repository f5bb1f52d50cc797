"""SIGINT and SIGTERM: before a command begins nothing is done, and they end the program at once, with a word.

Later the first of them is an exception, and what then cleans up is not interrupted again: half a pair would go on
without its other rank. A person who insists is told, and at the third Ctrl-C let go.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """SIGTERM, handled as Ctrl-C is, with its own exit code."""

    exit_code = 128 + signal.SIGTERM


def watch() -> None:
    """Take both signals while all is still being imported; what the caller ignores stays ignored."""
    for number in _NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)


def begin() -> None:
    """From here on the first of them is an exception, since there is something to clean up."""
    for number in _NUMBERS:
        if signal.getsignal(number) is _leave:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del frame
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, _warn)
    if signal.getsignal(signal.SIGTERM) is _interrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if number == signal.SIGINT:
        with contextlib.suppress(OSError):
            os.write(2, "\nending…\n".encode())
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def _warn(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, _let_go)
    os.write(2, b"\nending what runs, so that nothing is left half done; Ctrl-C once more leaves it as it is\n")


def _let_go(number: int, frame: FrameType | None) -> None:
    del frame
    _end(number, "left while it was ending: what it began is still there", "sparkserve status; sparkserve stop")


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    _end(number, "interrupted", "the same command can be typed again")


def _end(number: int, message: str, hint: str) -> None:
    """Say it without any other module: one may be half imported."""
    code = 128 + number
    words = [word for word in sys.argv[1:] if word.replace("-", "").isalnum()]
    name = next((word for word in words if not word.startswith("-")), "sparkserve")
    error = f'{{"code": "interrupted", "node": "", "message": "{message}", "hint": "{hint}", "details": ""}}'
    line = (
        f'{{"schema": 1, "command": "{name}", "status": "failed", "exit_code": {code}, "data": null, '
        f'"errors": [{error}]}}\n'
    )
    try:
        os.write(*((1, line.encode()) if "--json" in words else (2, f"error: {message}\nhint: {hint}\n".encode())))
    finally:
        os._exit(code)
