"""Which weights a node holds: the facts that both weights rooms plan from, and the small steps that they share."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from sparkserve.cluster import Node
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError
from sparkserve.lock import Lock
from sparkserve.manifest import FileFacts, Manifest, ManifestFile, find_problem, is_proved
from sparkserve.partial import JOURNAL_SUFFIX
from sparkserve.plan import Work

PARTIALS = ".sparkserve-partial"
_MISSING = FileFacts("missing")
# The arguments are directories of partials.
_TIDY = """for place; do
    for journal in "$place"/*.journal*; do [ -e "${journal%.journal*}" ] || rm -f -- "$journal"; done
    [ ! -d "$place" ] || rmdir --ignore-fail-on-non-empty -- "$place"
done"""
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

    def address(self, endpoint: str) -> str:
        """Where a hub answers for it."""
        return f"{endpoint}/{quote(self.manifest.repository)}/resolve/{self.manifest.commit}/{quote(self.file.path)}"

    def __str__(self) -> str:
        return f"{self.file.path} of {self.manifest.repository} at {self.manifest.commit[:8]}"

    def own_path(self, node: Node) -> str:
        """Where we write it, whatever file of others is used meanwhile."""
        return f"{node.models_dir}/{self.name}"

    def partial_path(self, node: Node) -> str:
        """Give the hidden file beside the goal in which it grows."""
        quoted = self.file.path.replace("%", "%25").replace("/", "%2F")
        return f"{node.models_dir}/{self.manifest.directory}/{PARTIALS}/{quoted}"


@dataclass(frozen=True)
class Facts:
    """What a node holds, by `Item.name`: every wanted file, the bytes of files under way, and which the hub sends."""

    files: Mapping[str, FileFacts]
    partial_bytes: Mapping[str, int]
    downloads: Collection[str] = ()

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
    journals = [(path + JOURNAL_SUFFIX, algorithm) for path, algorithm in partials]
    wanted = [{"path": path, "algorithm": algorithm} for path, algorithm in (*paths, *partials, *journals)]
    rows = node.session.ask("look", store=node.proofs_file, files=wanted)
    files, partial_bytes, downloads = {}, {}, set()
    for item, (path, _), (partial, _) in zip(items, paths, partials, strict=True):
        row = rows[path]
        files[item.name] = FileFacts(row["kind"], row["size"], row["digest"])
        if rows[partial]["kind"] == "file":
            partial_bytes[item.name] = min(item.file.size, rows[partial]["blocks"])
            if partial_bytes[item.name] and rows[partial + JOURNAL_SUFFIX]["kind"] == "file":
                downloads.add(item.name)
    return Facts(files, partial_bytes, downloads)


def find_need(item: Item, facts: Facts, node: Node) -> str | None:
    """Say what keeps a file from being proved, and where one of others should be; None when it is."""
    observed = facts.of(item)
    if is_proved(item.file, observed):
        return None
    problem = find_problem(item.file, observed) or "not proved"
    here = 0 if problem == "not proved" else facts.partial_bytes.get(item.name, 0)
    under_way = f", {100 * here // item.file.size} % under way" if here else ""
    adopted = node.adopted.get(item.name)
    return f"{problem}{under_way}" + (f" (adopted: {adopted})" if adopted else "")


def only_needs_proof(item: Item, facts: Facts) -> bool:
    """Whether a file has the right kind and size, and just its hash is not known."""
    return find_problem(item.file, facts.of(item)) is None


def bytes_missing(lock: Lock, facts: Facts) -> int:
    """Count the bytes that are still to be written on a node; what is under way counts as there."""
    broken = [item for item in list_items(lock) if find_problem(item.file, facts.of(item)) is not None]
    return sum(item.file.size - facts.partial_bytes.get(item.name, 0) for item in broken)


def hash_files(node: Node, places: Mapping[str, ManifestFile], work: Work) -> dict[str, FileFacts]:
    """Hash files, given by path, on their node, which remembers the results."""
    files = [{"path": path, "algorithm": file.algorithm, "size": file.size} for path, file in places.items()]
    total = sum(file.size for file in places.values())

    def tell(progress: Mapping[str, int]) -> None:
        work.check()
        work.progress(progress["bytes"], total)

    rows = node.session.ask("hash", store=node.proofs_file, files=files, on_progress=tell)
    return {path: FileFacts(row["kind"], row["size"], row["digest"]) for path, row in rows.items()}


def prove(node: Node, item: Item, work: Work, path: str = "") -> str | None:
    """Hash a file where it is used (or at another path) and say what keeps it from being right; None when it is."""
    path = path or node.place(item.manifest, item.file)
    problem = find_problem(item.file, hash_files(node, {path: item.file}, work)[path])
    return "unreadable, could not look" if problem == "unreadable" else problem


def settle(node: Node, item: Item, work: Work) -> str:
    """Give a partial whose hash is right its name, durably, and remember the hash; tell what is there now."""
    work.note("writing it out")
    source = item.partial_path(node)
    answer = node.session.ask(
        "settle",
        timeout=600,
        source=source,
        journal=source + JOURNAL_SUFFIX,
        target=item.own_path(node),
        store=node.proofs_file,
        algorithm=item.file.algorithm,
        digest=item.file.digest,
    )
    # From now on our own file is used, where one of others stood for it until it turned out to be wrong.
    if item.name in node.adopted:
        note_adopted(node, item, None)
    return f"{answer['size']} bytes, {item.proof}"


def note_adopted(node: Node, item: Item, path: str | None) -> None:
    """Note on the node which file of others it uses in place; None: its own from now on."""
    with _adopting:
        node.adopted.pop(item.name, None)
        if path is not None:
            node.adopted[item.name] = path
        directory = f"{node.models_dir}/.sparkserve"
        node.session.ask("mkdir", paths=[directory])
        node.host.write(f"{directory}/adopted.json", json.dumps(node.adopted, indent=1).encode())


def tidy(node: Node, lock: Lock) -> None:
    """Remove journals that a kill left without their partials, and directories of partials that are empty by now."""
    places = [f"{node.models_dir}/{manifest.directory}/{PARTIALS}" for manifest in lock.weights]
    node.host.run(["sh", "-c", _TIDY, "sh", *places], check=False)


def find_command(place: str, *words: str) -> list[str]:
    """Give the command that lists what is below a directory; one that is not there holds nothing."""
    return ["sh", "-c", '[ ! -d "$1" ] || exec find "$@"', "sh", place, *words]


def found_lines(node: Node, answer: Mapping[str, Any] | None) -> list[str]:
    """Read what a `find` with zero bytes between its lines gave; one that could not look is an error."""
    if answer is None or answer["code"] != 0:
        message = "listing our directories took too long" if answer is None else "our directories cannot be listed"
        hint = "look at the disk of that node, and at the owners there"
        raise SparkserveError("disk_look", message, hint, node.role, (answer or {}).get("err", ""), EXIT_COULD_NOT_LOOK)
    return sorted(filter(None, answer["out"].split("\0")))
