"""`weights verify --full` of the head alone, in a process of its own: `python -m tests.bench.head_hash DIR`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sparkserve.cluster import Node
from sparkserve.hosts import LocalHost
from sparkserve.inventory import hash_files, list_items
from sparkserve.lock import NAME, Lock
from sparkserve.manifest import is_proved
from sparkserve.settings import load


def main() -> None:
    """Read every file of the lock where the head uses it; fail unless all are right."""
    os.chdir(sys.argv[1])
    lock = Lock.model_validate_json(Path(NAME).read_bytes())
    head = Node("head", LocalHost("head"), load(Path(".env"), {}, {}).settings)
    files = {head.place(item.manifest, item.file): item.file for item in list_items(lock)}
    found = hash_files(head, files, lambda _done: None)
    head.close()
    sys.exit(not all(is_proved(file, found[path]) for path, file in files.items()))


if __name__ == "__main__":
    main()
