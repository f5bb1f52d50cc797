"""Looks through folders for files of wanted sizes: `{"folders": […], "sizes": […]}` as its one argument.

Standard library only, Python 3.9 or newer: the text of this file is an argument of the node's own python3. Links are
followed, each directory is entered once, and nothing is opened. It answers one line: `{"files": [[path, place, size]],
"missing": [folder], "problems": [text]}`, where `place` is the path without links.
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
import sys


def search(folders: list[str], sizes: set[int]) -> dict[str, list[object]]:
    """Walk the folders; a link that leads nowhere is no file, and a closed directory is told."""
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
            for name in names:
                path = pathlib.Path(above, name)
                try:
                    found = path.stat()
                except OSError:
                    continue
                if stat.S_ISREG(found.st_mode) and found.st_size in sizes:
                    files.append([str(path), os.path.realpath(path), found.st_size])
    return {"files": files, "missing": missing, "problems": problems}


if __name__ == "__main__":
    order = json.loads(sys.argv[1])
    sys.stdout.write(json.dumps(search(order["folders"], set(order["sizes"]))) + "\n")
