"""Which weights a node holds: the facts that both weights rooms plan from, and the small steps that they share."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from sparkserve.cluster import Node
from sparkserve.lock import Lock
from sparkserve.manifest import FileFacts, Manifest, ManifestFile, find_problem, is_proved
from sparkserve.plan import Work

PARTIALS = ".sparkserve-partial"
_MISSING = FileFacts("missing")
_adopting = threading.Lock()


@dataclass(frozen=True)
class Item:
    """One wanted file."""

    manifest: Manifest
    file: ManifestFile

    @property
    def name(self) -> str:
        """Its name below every models directory: `<org>/<name>/<commit>/<path>`."""
        return f"{self.manifest.directory}/{self.file.path}"

    @property
    def resource(self) -> str:
        """Its name in plans, the same on both nodes."""
        return f"{self.manifest.name}/{self.file.path}"

    @property
    def proof(self) -> str:
        """What a proved file shows, shortened for people."""
        return f"{self.file.algorithm}:{self.file.digest[:12]}…"

    def own_path(self, node: Node) -> str:
        """Where we write it, whatever file of others is used meanwhile."""
        return f"{node.models_dir}/{self.name}"

    def partial_path(self, node: Node) -> str:
        """Give the hidden file beside the goal in which it grows."""
        quoted = self.file.path.replace("%", "%25").replace("/", "%2F")
        return f"{node.models_dir}/{self.manifest.directory}/{PARTIALS}/{quoted}"


@dataclass(frozen=True)
class Facts:
    """What a node holds, by `Item.name`: every wanted file, and the bytes of files that are under way."""

    files: Mapping[str, FileFacts]
    partial_bytes: Mapping[str, int]

    def of(self, item: Item) -> FileFacts:
        """Give what was seen of a file."""
        return self.files.get(item.name, _MISSING)


def list_items(lock: Lock) -> list[Item]:
    """List every wanted file once, largest first."""
    items = {item.name: item for manifest in lock.weights for item in (Item(manifest, f) for f in manifest.files)}
    return sorted(items.values(), key=lambda item: -item.file.size)


def gather(node: Node, lock: Lock) -> Facts:
    """Look at every wanted file of a node in one request; nothing is read but remembered hashes."""
    items = list_items(lock)
    paths = [(node.place(item.manifest, item.file), item.file.algorithm) for item in items]
    partials = [(item.partial_path(node), item.file.algorithm) for item in items]
    wanted = [{"path": path, "algorithm": algorithm} for path, algorithm in (*paths, *partials)]
    rows = node.session.ask("look", store=node.proofs_file, files=wanted)
    files, partial_bytes = {}, {}
    for item, (path, _), (partial, _) in zip(items, paths, partials, strict=True):
        row = rows[path]
        files[item.name] = FileFacts(row["kind"], row["size"], row["digest"])
        if rows[partial]["kind"] == "file":
            partial_bytes[item.name] = min(item.file.size, rows[partial]["blocks"])
    return Facts(files, partial_bytes)


def find_need(item: Item, facts: Facts) -> str | None:
    """Say what keeps a file from being proved; None when it is."""
    observed = facts.of(item)
    if is_proved(item.file, observed):
        return None
    problem = find_problem(item.file, observed)
    if problem is None:
        return "not proved"
    here = facts.partial_bytes.get(item.name, 0)
    return f"{problem}, {100 * here // item.file.size} % under way" if here else problem


def only_needs_proof(item: Item, facts: Facts) -> bool:
    """Whether a file has the right kind and size, and just its hash is not known."""
    return find_problem(item.file, facts.of(item)) is None


def bytes_missing(lock: Lock, facts: Facts) -> int:
    """Count the bytes that are still to be written on a node; what is under way counts as there."""
    broken = [item for item in list_items(lock) if find_problem(item.file, facts.of(item)) is not None]
    return sum(item.file.size - facts.partial_bytes.get(item.name, 0) for item in broken)


def prove(node: Node, item: Item, work: Work) -> bool:
    """Hash a file on its node, which remembers the result; tells whether it is right."""

    def tell(progress: dict[str, int]) -> None:
        work.check()
        work.progress(progress["bytes"], item.file.size)

    path = node.place(item.manifest, item.file)
    wanted = {"path": path, "algorithm": item.file.algorithm, "size": item.file.size}
    row = node.session.ask("hash", store=node.proofs_file, files=[wanted], on_progress=tell)[path]
    return is_proved(item.file, FileFacts(row["kind"], row["size"], row["digest"]))


def settle(node: Node, item: Item, work: Work) -> str:
    """Give a partial whose hash is right its name, durably, and remember the hash; tell what is there now."""
    work.note("writing it out")
    answer = node.session.ask(
        "settle",
        timeout=600,
        source=item.partial_path(node),
        target=item.own_path(node),
        store=node.proofs_file,
        algorithm=item.file.algorithm,
        digest=item.file.digest,
    )
    _use_own(node, item)
    return f"{answer['size']} bytes, {item.proof}"


def _use_own(node: Node, item: Item) -> None:
    """From now on our own file is used, where one of others stood for it until it turned out to be wrong."""
    with _adopting:
        if node.adopted.pop(item.name, None) is not None:
            node.host.write(f"{node.models_dir}/.sparkserve/adopted.json", json.dumps(node.adopted, indent=1).encode())
