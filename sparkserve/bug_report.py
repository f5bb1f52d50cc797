"""What happens when the failure is ours: the traceback goes to a log, the user gets one line and the log's path."""

from __future__ import annotations

import os
import platform
import shlex
import time
import traceback
from collections.abc import Sequence

from pydantic import SecretStr

from sparkserve import __version__
from sparkserve.cluster import state_dir
from sparkserve.errors import SparkserveError
from sparkserve.hosts import mask

_KEPT = 10


def write_bug_report(error: Exception, words: Sequence[str]) -> tuple[SparkserveError]:
    """Write the traceback to a log under the state directory and give the error that names it."""
    directory = state_dir(os.environ) / "bugs"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / time.strftime("%Y%m%d-%H%M%S.log")
    head = f"sparkserve {__version__}, Python {platform.python_version()}, {platform.platform()}\n{shlex.join(words)}\n"
    text = head + "".join(traceback.format_exception(error))
    secrets = [SecretStr(os.environ.get("HF_TOKEN", ""))]
    path.write_text(mask(text, secrets), encoding="utf-8")
    for old in sorted(directory.glob("*.log"))[:-_KEPT]:
        old.unlink()
    message = mask(f"this is a bug in sparkserve: {type(error).__name__}: {error}", secrets)
    return (SparkserveError("bug", message, f"please report it with {path}"),)
