"""The download step of the head alone, in a process of its own: `python -m tests.bench.head_download DIR`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sparkserve import weights
from sparkserve.cluster import Cluster, Deployment, Node
from sparkserve.hosts import LocalHost
from sparkserve.lock import NAME, Lock
from sparkserve.plan import Plan, apply
from sparkserve.progress import GroupReporter
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import load


def main() -> None:
    """Plan and carry out what the settings and the lock of a directory say."""
    directory = Path(sys.argv[1])
    os.chdir(directory)
    settings = load(Path(".env"), {}, {}).settings
    lock = Lock.model_validate_json(Path(NAME).read_bytes())
    head = Node("head", LocalHost("head"), settings)
    deployment = Deployment(settings, load_recipe(settings.recipe), lock, Cluster(head, head))
    facts = weights.gather(head, lock)
    changes = weights.plan(deployment, {"head": facts, "worker": weights.Facts({}, {})})
    plan = Plan(tuple({change.key: change for change in changes}.values()))  # both nodes are the head
    apply(plan, GroupReporter(plan)).raise_failures()
    head.close()


if __name__ == "__main__":
    main()
