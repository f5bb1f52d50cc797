"""What happens when the failure is ours: the traceback goes to a log, the user gets one line and the log's path."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from pydantic import SecretStr

from sparkserve import __version__
from sparkserve.errors import SparkserveError
from sparkserve.hosts import mask
from sparkserve.settings import state_dir

_KEPT = 10
# What a disk, a mount or a mode does to us.
_NOT_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EISDIR, errno.ENOTDIR)


def _is_named(error: OSError, words: Sequence[str]) -> bool:
    """Whether the missing path is on the way to one that the command line or our state's place names, or below it."""
    named = [*words, *(word.partition("=")[2] for word in words), os.environ.get("XDG_STATE_HOME", "")]
    missing = str(error.filename or "")
    return bool(missing) and any(word and (missing.startswith(word) or word.startswith(missing)) for word in named)


def explain(error: Exception, words: Sequence[str]) -> SparkserveError:
    """Turn what nobody expected into an error: the machine's fault by its own words, ours with a log of it."""
    if isinstance(error, FileNotFoundError) and _is_named(error, words):
        hint = "make the directory first, or name another path"
        return SparkserveError("file_failed", f"{error.filename}: {error.strerror}", hint, "head")
    if isinstance(error, OSError) and error.errno in _NOT_OURS:
        where = f"{error.filename}: " if error.filename else ""
        hint = "look at the room, owner and mode of that path" if where else "look at where the output goes"
        return SparkserveError("file_failed", f"{where}{error.strerror}", hint, "head")
    secrets = [SecretStr(os.environ.get("HF_TOKEN", ""))]
    message = mask(f"this is a bug in sparkserve: {type(error).__name__}: {error}", secrets)
    try:
        hint = f"please report it with {_write_log(error, words, secrets)}"
    except OSError as failed:
        hint = f"its log cannot be written ({failed}): set XDG_STATE_HOME to a writable directory and run it again"
    return SparkserveError("bug", message, hint)


def _write_log(error: Exception, words: Sequence[str], secrets: Sequence[SecretStr]) -> Path:
    directory = state_dir(os.environ) / "bugs"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    head = f"sparkserve {__version__}, Python {platform.python_version()}, {platform.platform()}\n{shlex.join(words)}\n"
    path.write_text(mask(head + "".join(traceback.format_exception(error)), secrets), encoding="utf-8")
    for old in sorted(directory.glob("*.log"))[:-_KEPT]:
        old.unlink()
    return path
