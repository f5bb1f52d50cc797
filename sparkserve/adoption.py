"""Weights of others used in place: found in a folder or a Hugging Face cache, proved by hash, and only noted down."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparkserve.cluster import ROLES, Deployment, Node, Role
from sparkserve.errors import Failures, usage_error
from sparkserve.hosts import expand_home
from sparkserve.inventory import Facts, Item, list_items, note_adopted, prove
from sparkserve.lock import Lock
from sparkserve.manifest import is_proved
from sparkserve.plan import ApplyReport, Change, LeftAlone, Work

STEP = "adopt"
_SEARCH_SECONDS = 600.0
Places = Mapping[str, list[str]]


@dataclass(frozen=True)
class Found:
    """A file of a wanted size: how it was come upon, and its path without links."""

    path: str
    place: str
    size: int


@dataclass(frozen=True)
class Search:
    """What a node has: candidates by `Item.name`, likeliest first; folders that are not there; what is closed to us."""

    places: Places
    missing: Collection[str] = ()
    problems: Collection[str] = ()


def parse_folders(words: Iterable[str], here: Path) -> dict[Role, list[str]]:
    """Read `DIR` (looked for on both nodes), `head:DIR` and `worker:DIR`."""
    folders: dict[Role, list[str]] = {role: [] for role in ROLES}
    for word in words:
        prefix, _, rest = word.partition(":")
        roles = [role for role in ROLES if role == prefix and rest] or list(ROLES)
        path = rest if len(roles) == 1 else word
        if roles == ["worker"] and not path.startswith(("/", "~")):
            raise usage_error("adopt_relative", f"{word} is a relative path", "give the worker's path from / or ~ on")
        for role in roles:
            folders[role].append(path if path.startswith("~") else str(here / path))
    return folders


def find(deployment: Deployment, folders: Mapping[Role, list[str]]) -> dict[Role, Search]:
    """Look for candidates on both nodes; a folder that was meant for both may be missing on one."""
    found = deployment.cluster.on_both(lambda node: _search(node, folders[node.role], deployment.lock))
    wanted = sorted({folder for own in folders.values() for folder in own})
    there = {folder for role in ROLES for folder in folders[role] if folder not in found[role].missing}
    hint = "head:DIR and worker:DIR name a folder of one node"
    nowhere = [usage_error("adopt_missing", f"there is no folder {one}", hint) for one in wanted if one not in there]
    if nowhere:
        raise Failures(nowhere)
    return found


def _search(node: Node, folders: list[str], lock: Lock) -> Search:
    items = list_items(lock)
    names = {expand_home(Path(folder), node.identity["home"]): folder for folder in folders}
    sizes = sorted({item.file.size for item in items})
    answer = node.session.ask("search", timeout=_SEARCH_SECONDS, folders=list(names), sizes=sizes)
    rows = [Found(*row) for row in answer["files"]]
    missing = [names[folder] for folder in answer["missing"]]
    return Search({item.name: choose(item, rows) for item in items}, missing, answer["problems"])


def choose(item: Item, rows: Iterable[Found]) -> list[str]:
    """Give the places where a file may be: named by its hash, of its commit, or just of its name and size."""

    def doubt(row: Found) -> tuple[bool, bool, bool, str]:
        path = f"/{item.file.path}"
        other_commit = f"/{item.manifest.commit}/" not in row.path
        return not row.place.endswith(f"/{item.file.digest}"), other_commit, not row.path.endswith(path), row.path

    name = f"/{item.file.path.rpartition('/')[2]}"
    alike = [row for row in rows if row.size == item.file.size]
    named = [row for row in alike if row.path.endswith(name) or row.place.endswith(f"/{item.file.digest}")]
    return list(dict.fromkeys(row.place for row in sorted(named, key=doubt)))


def plan(deployment: Deployment, facts: Mapping[Role, Facts], found: Mapping[Role, Search]) -> list[Change]:
    """Plan the proof of what was found, for every file that its node does not hold proved."""
    return [
        Change(node.role, STEP, item.resource, "not looked at", item.proof, action, lane="hash", size=item.file.size)
        for node in deployment.cluster.nodes
        for item, places in _open(node, deployment.lock, facts[node.role], found[node.role].places)
        for action in (partial(_adopt, node, item, places),)
    ]


def assume(deployment: Deployment, facts: Mapping[Role, Facts], found: Mapping[Role, Search]) -> None:
    """Take the likeliest places for this run only, unread: what `--dry-run` plans from."""
    for node in deployment.cluster.nodes:
        for item, places in _open(node, deployment.lock, facts[node.role], found[node.role].places):
            node.adopted[item.name] = places[0]


def tell_rest(report: ApplyReport, warn: Callable[[str], None]) -> None:
    """Warn of every file that is not used in place after all, also where that failed: it is fetched instead."""
    report.left_alone += [(change, error.message) for change, error in report.failed]
    report.left_alone += [(change, "not looked at") for change in report.not_reached]
    for change, why in report.left_alone:
        warn(f"{change.node}: {change.resource} is not used in place: {why}")


def _open(node: Node, lock: Lock, facts: Facts, found: Places) -> Iterator[tuple[Item, list[str]]]:
    """Give the files that are not proved yet, with other places than our own."""
    for item in list_items(lock):
        places = [place for place in found[item.name] if place != item.own_path(node)]
        if places and not is_proved(item.file, facts.of(item)):
            yield item, places


def _adopt(node: Node, item: Item, places: Collection[str], work: Work) -> str:
    problems = []
    for place in places:
        work.note(f"{item.resource}: {place}")
        problem = prove(node, item, work, place)
        if not problem:
            note_adopted(node, item, place)
            return f"{item.file.size} bytes in place, {item.proof}"
        problems.append(f"{place}: {problem}")
    raise LeftAlone("; ".join(problems))
