"""Looks through folders for files of wanted sizes: what the node program's `search` does.

Standard library only, Python 3.9 or newer: it is sent to a node with `node_program`, which imports it.
"""

from __future__ import annotations

import os
import pathlib
import stat
from typing import Any


def search(request: dict[str, Any]) -> dict[str, list[object]]:
    """Give `[path, place, size]` of the `files`, `missing` folders and `problems`; `place` is the path without links.

    Links are followed, each directory is entered once, and nothing is opened. A link that leads nowhere is no file.
    """
    folders, sizes = request["folders"], set(request["sizes"])
    files: list[object] = []
    missing: list[object] = [folder for folder in folders if not pathlib.Path(folder).is_dir()]
    problems: list[object] = []
    seen = set()

    def closed(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror}")

    for folder in folders:
        for above, below, names in os.walk(folder, followlinks=True, onerror=closed if folder not in missing else None):
            found = pathlib.Path(above).stat()
            if (found.st_dev, found.st_ino) in seen:
                below[:] = []
                continue
            seen.add((found.st_dev, found.st_ino))
            below.sort()  # or chance decides by which of its names a directory is entered
            for name in names:
                path = pathlib.Path(above, name)
                try:
                    found = path.stat()
                except OSError:
                    continue
                if stat.S_ISREG(found.st_mode) and found.st_size in sizes:
                    files.append([str(path), os.path.realpath(path), found.st_size])
    return {"files": files, "missing": missing, "problems": problems}
