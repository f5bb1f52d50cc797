"""Further files for the engine, on both nodes: the recipe's own, and tensors taken out of weights; named by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkserve import derive_program
from sparkserve.cluster import Deployment, Node, Role
from sparkserve.errors import SparkserveError
from sparkserve.lock import OpenLock
from sparkserve.manifest import Manifest
from sparkserve.plan import Change, Work, key_of
from sparkserve.recipe import Derived
from sparkserve.streams import follow

STEP = "derive"


# What a node tells of each file, by its path in the container: its kind, and its hash where it is as it was proved.
Facts = Mapping[str, Mapping[str, Any]]


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
    """Look at every file of a node."""
    return look(node, mounts_on(node, deployment))


def look(node: Node, places: Mapping[str, str]) -> Facts:
    """Look at files that stand at paths which say what they are made of; nothing is read but remembered hashes."""
    if not places:
        return {}
    asked = [{"path": path, "algorithm": "sha256"} for path in places.values()]
    rows = node.session.ask("look", store=node.proofs_file, files=asked)
    return {target: rows[path] for target, path in places.items()}


def find_wrong(facts: Mapping[Role, Facts], target: str) -> dict[Role, str]:
    """Say what is wrong with a file where it is: a node lacks it, or both have another."""
    rows = {role: found[target] for role, found in facts.items()}
    differ = len({row["digest"] for row in rows.values()} - {None}) > 1
    wrong = {role: "not as it was made" for role, row in rows.items() if row["digest"] is None}
    wrong |= dict.fromkeys((role for role in rows if differ), "not the same on both nodes")
    return wrong | {role: "absent" for role, row in rows.items() if row["kind"] == "missing"}


def plan(deployment: Deployment, facts: Mapping[Role, Facts]) -> list[Change]:
    """Plan each file where a node lacks it, and on both where they differ."""
    single = {path_on(deployment.cluster.head, deployment, item): item for item in deployment.recipe.derived}
    return [
        _change(deployment, deployment.cluster.node(role), item, before)
        for item in single.values()
        for role, before in find_wrong(facts, item.mount).items()
    ]


def _change(deployment: Deployment, node: Node, item: Derived, before: str) -> Change:
    needs: tuple[str, ...] = ()
    if not item.file:  # the weights must be there, and proved
        source, step = _source(deployment, item), "download" if node.role == "head" else "sync"
        needs = tuple(key_of(node.role, step, f"{source.name}/{file.path}") for file in source.files)

    def action(work: Work) -> str:
        path = path_on(node, deployment, item)
        if item.file:
            return put(node, path, deployment.recipe.file(item.file))
        return f"{_extract(deployment, node, item, work)}, {_prove(node, path, item.expected_bytes)}"

    after = f"{item.file} of the recipe" if item.file else f"{item.count} tensors of {item.weights}"
    return Change(node.role, STEP, item.mount, before, after, action, needs, "hash", item.expected_bytes)


def put(node: Node, path: str, content: bytes) -> str:
    """Write a small file, and prove by its hash that the node has it."""
    node.session.ask("mkdir", paths=[path.rpartition("/")[0]])
    node.host.write(path, content)
    proof, wanted = _prove(node, path, len(content)), hashlib.sha256(content).hexdigest()
    if wanted[:12] not in proof:
        message = f"{path} has {proof} after writing; needed: {len(content)} bytes, sha256 {wanted[:12]}"
        raise SparkserveError("file_differs", message, "look at the disk, then run the same command again", node.role)
    return proof


def _prove(node: Node, path: str, size: int) -> str:
    asked = {"path": path, "algorithm": "sha256", "size": size}
    row = node.session.ask("hash", store=node.proofs_file, files=[asked], timeout=600)[path]
    return f"{row['size']} bytes, sha256 {str(row['digest'])[:12]}"


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
