"""Further files for the engine, on both nodes: the recipe's own, and tensors taken out of weights; named by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from sparkserve import derive_program
from sparkserve.cluster import Deployment, Node, Role
from sparkserve.errors import SparkserveError
from sparkserve.lock import OpenLock
from sparkserve.manifest import Manifest
from sparkserve.plan import Change, Work, key_of
from sparkserve.recipe import Derived
from sparkserve.streams import follow

STEP = "derive"


# The hash of each file on a node, by name; None where it is absent, or changed since it was made.
Facts = Mapping[str, str | None]


def path_on(node: Node, deployment: Deployment, item: Derived) -> str:
    """Give the path of a file on a node: it holds a hash of all that the file is made of."""
    if isinstance(deployment.lock, OpenLock):
        return f"{node.cache_dir}/derived/<id>/{item.name}"
    if item.file:
        made_of: object = hashlib.sha256(deployment.recipe.file(item.file)).hexdigest()
    else:
        hashes = [file.digest for file in _source(deployment, item).files]
        made_of = [item.tensors, item.layers, item.dtype, hashes]
    identity = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:16]
    return f"{node.cache_dir}/derived/{identity}/{item.name}"


def mounts_on(node: Node, deployment: Deployment) -> dict[str, str]:
    """Give path in the container and path on the node of every file."""
    return {item.mount: path_on(node, deployment, item) for item in deployment.recipe.derived}


def gather(node: Node, deployment: Deployment) -> Facts:
    """Look at every file of a node; nothing is read but remembered hashes."""
    paths = {item.name: path_on(node, deployment, item) for item in deployment.recipe.derived}
    if not paths:
        return {}
    asked = [{"path": path, "algorithm": "sha256"} for path in paths.values()]
    rows = node.session.ask("look", store=node.proofs_file, files=asked)
    return {name: rows[path]["digest"] for name, path in paths.items()}


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan each file where a node lacks it, and on both where they differ."""
    changes = []
    for item in deployment.recipe.derived:
        digests = {role: facts[role][item.name] for role in facts}
        differ = len(set(filter(None, digests.values()))) > 1
        for node in deployment.cluster.nodes:
            if digests[node.role] is None or differ:
                before = "absent" if digests[node.role] is None else "not the same on both nodes"
                changes.append(_change(deployment, node, item, before))
    return changes


def _change(deployment: Deployment, node: Node, item: Derived, before: str) -> Change:
    needs: tuple[str, ...] = ()
    if not item.file:  # the weights must be there, and proved
        source, step = _source(deployment, item), "download" if node.role == "head" else "sync"
        needs = tuple(key_of(node.role, step, f"{source.name}/{file.path}") for file in source.files)

    def action(work: Work) -> str:
        path = path_on(node, deployment, item)
        made = _put(deployment, node, item, path) if item.file else _extract(deployment, node, item, work)
        asked = {"path": path, "algorithm": "sha256", "size": item.expected_bytes}
        row = node.session.ask("hash", store=node.proofs_file, files=[asked], timeout=600)[path]
        return f"{made}, {row['size']} bytes, sha256:{row['digest'][:12]}…"

    after = f"{item.file} of the recipe" if item.file else f"{item.count} tensors of {item.weights}"
    return Change(node.role, STEP, item.name, before, after, action, needs, "hash", item.expected_bytes)


def _put(deployment: Deployment, node: Node, item: Derived, path: str) -> str:
    node.session.ask("mkdir", paths=[path.rpartition("/")[0]])
    node.host.write(path, deployment.recipe.file(item.file))
    return "written"


def _extract(deployment: Deployment, node: Node, item: Derived, work: Work) -> str:
    """Run the program on the node: tensors are read by offset, so only their own bytes are touched."""
    source = _source(deployment, item)
    order = {
        "sources": [node.place(source, file) for file in source.files if file.path.endswith(".safetensors")],
        "tensors": item.tensors,
        "layers": item.layers,
        "dtype": item.dtype,
        "target": path_on(node, deployment, item),
    }
    last: dict[str, object] = {}

    def on_line(line: str) -> None:
        if line.startswith("{"):
            last.clear()
            last.update(json.loads(line))
            if "done" in last:
                work.progress(int(str(last["done"])), int(str(last["total"])))

    program = Path(derive_program.__file__).read_text(encoding="utf-8")
    argv = [node.host.python, "-I", "-c", program, json.dumps(order)]
    result = follow(node.host, argv, work.check, on_line)
    if "tensors" not in last:
        message = (
            f"cannot take {item.count} tensors out of {source.repository}: {last.get('error', 'the program ended')}"
        )
        hint = f"look at `tensors`, `layers` and `dtype` of the derived {item.name} in the recipe"
        raise SparkserveError("derive_failed", message, hint, node.role, "" if "error" in last else result.text)
    return f"{last['tensors']} tensors"


def _source(deployment: Deployment, item: Derived) -> Manifest:
    return next(manifest for manifest in deployment.lock.weights if manifest.name == item.weights)
