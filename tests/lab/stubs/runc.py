#!/usr/bin/python3 -IS
"""The node's runc on a machine that may not raise resource limits: asks for no more than the machine itself has.

What the container was created with (`docker inspect`) is untouched; only the attempt to exceed the machine is left out.
"""

import itertools
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

REAL = "/usr/sbin/runc"


def lowered(limit: dict[str, Any]) -> dict[str, Any]:
    """Cap one limit of the runtime specification at the machine's hard limit."""
    hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
    if hard == resource.RLIM_INFINITY:
        return limit
    return {**limit, "hard": min(limit["hard"], hard), "soft": min(limit["soft"], hard)}


def rewrite(path: Path, *, nested: bool) -> None:
    """Lower the limits in a bundle's configuration (`nested`) or in the description of one more process."""
    content = json.loads(path.read_text())
    process = content["process"] if nested else content
    process["rlimits"] = [lowered(limit) for limit in process.get("rlimits") or []]
    path.write_text(json.dumps(content))


def main() -> None:
    """Change what is about to be run, then become the real runc."""
    arguments = sys.argv[1:]
    options = dict(itertools.pairwise(arguments))
    if "--bundle" in options and {"create", "run"} & set(arguments):
        rewrite(Path(options["--bundle"], "config.json"), nested=True)
    if "--process" in options:
        rewrite(Path(options["--process"]), nested=False)
    os.execv(REAL, [REAL, *arguments])


if __name__ == "__main__":
    main()
