"""SIGINT and SIGTERM: before a command begins nothing is done, and they end the program at once, with a word."""

from __future__ import annotations

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
    """From here on both are exceptions, since there is something to clean up."""
    for number, handler in zip(_NUMBERS, (signal.default_int_handler, _terminate), strict=True):
        if signal.getsignal(number) is _leave:
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    """Say it without any other module: one may be half imported."""
    del frame
    code = 128 + number
    words = [word for word in sys.argv[1:] if word.replace("-", "").isalnum()]
    name = next((word for word in words if not word.startswith("-")), "sparkserve")
    error = '{"code": "interrupted", "node": "", "message": "interrupted", "hint": "", "details": ""}'
    line = (
        f'{{"schema": 1, "command": "{name}", "status": "failed", "exit_code": {code}, "data": null, '
        f'"errors": [{error}]}}\n'
    )
    try:
        os.write(*((1, line.encode()) if "--json" in words else (2, b"error: interrupted\n")))
    finally:
        os._exit(code)


def _terminate(number: int, frame: FrameType | None) -> None:
    del number, frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
