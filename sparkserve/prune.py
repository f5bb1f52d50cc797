"""What can go: files of ours that neither a lock nor a container uses; nothing of others is listed or touched."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparkserve.cluster import Node
from sparkserve.engine_facts import docker_body
from sparkserve.engine_logs import saved_runs
from sparkserve.errors import SparkserveError
from sparkserve.inventory import PARTIALS, Item, find_command, found_lines, gather, list_items
from sparkserve.lock import Lock
from sparkserve.manifest import find_problem
from sparkserve.partial import JOURNAL_SUFFIX
from sparkserve.plan import Change, Work

STEP = "prune"
_IMAGE_PREFIX = "sparkserve/"
_IMAGE_LABEL = "sparkserve.recipe"
# What caches are kept apart by: the id of weights or image, or the hash of what a file is made of.
_ID = re.compile(r"[0-9a-f]{12}|[0-9a-f]{16}")
_CONTAINERS, _IMAGES = "/containers/json?all=1", "/images/json"
_BUILD_CACHE = "/system/df?type=build-cache"
_SECONDS = 600.0


@dataclass(frozen=True)
class Wanted:
    """What must stay on a node: the files of these locks, their engine images, the cache directories of both."""

    locks: tuple[Lock, ...]
    images: frozenset[str]
    folders: frozenset[str]

    @property
    def items(self) -> list[Item]:
        """Every wanted file."""
        return [item for lock in self.locks for item in list_items(lock)]


@dataclass(frozen=True)
class _Used:
    """What the node's containers hold, running or not, ours or not."""

    mounts: tuple[str, ...]
    images: frozenset[str]

    def holds(self, path: str) -> bool:
        return any(mount == path or mount.startswith(f"{path}/") for mount in self.mounts)


def plan(node: Node, wanted: Wanted) -> list[Change]:
    """Plan the removal of everything of ours on a node that is not wanted and not in use."""
    proofs = node.proofs_file
    folders = sorted({folder.rpartition("/")[0] for folder in wanted.folders})
    below = ("-mindepth", "1", "-maxdepth", "1", "-type", "d", "-print0")
    # What we may not enter holds nothing of ours: such as `lost+found`.
    words = ("!", "-readable", "-prune", "-o", "-path", f"*/{PARTIALS}/*", "-type", "f", "-printf", "%b %p\\0")
    commands = {folder: find_command(folder, *below) for folder in folders}
    commands["partials"] = find_command(node.models_dir, *words)
    raw = node.session.ask("facts", files=[proofs], docker=[_CONTAINERS, _IMAGES], commands=commands)
    lines = {name: found_lines(node, answer) for name, answer in raw["commands"].items()}
    containers = docker_body(raw["docker"][_CONTAINERS], node.role)
    mounts = tuple(mount.get("Source", "") for row in containers for mount in row.get("Mounts") or ())
    used = _Used(mounts, frozenset(row["ImageID"] for row in containers))
    return [
        *_plan_weights(node, wanted, used, json.loads(raw["files"][proofs] or "{}")),
        *_plan_partials(node, wanted, lines.pop("partials")),
        *_plan_caches(node, wanted, used, [path for paths in lines.values() for path in paths]),
        *_plan_images(node, wanted, used, docker_body(raw["docker"][_IMAGES], node.role)),
    ]


def _plan_weights(node: Node, wanted: Wanted, used: _Used, proofs: Mapping[str, Any]) -> Iterator[Change]:
    """Files that we wrote for another lock, one change for each set."""
    keep = {item.own_path(node) for item in wanted.items} | set(node.adopted.values())
    ours = [path for path, row in proofs.items() if isinstance(row, dict) and row.get("own")]
    paths = [path for path in ours if path.startswith(f"{node.models_dir}/") and path not in keep]
    files = [{"path": path, "algorithm": ""} for path in paths if not used.holds(path)]
    rows = node.session.ask("look", store=node.proofs_file, files=files) if files else {}
    sets: dict[str, dict[str, int]] = {}
    for path, row in rows.items():
        if row["kind"] == "file":
            sets.setdefault(_set_of(node, path), {})[path] = row["size"]
    for place, sizes in sorted(sets.items()):
        yield _files_change(node, place, "weights of another lock", sizes)


def _set_of(node: Node, path: str) -> str:
    """Give `<models>/<org>/<name>/<commit>`."""
    return "/".join(path.split("/")[: node.models_dir.count("/") + 4])


def _plan_partials(node: Node, wanted: Wanted, lines: list[str]) -> Iterator[Change]:
    """Half-fetched files that no download will go on with."""
    facts = {name: found for lock in wanted.locks for name, found in gather(node, lock).files.items()}
    open_items = [item for item in wanted.items if find_problem(item.file, facts[item.name])]
    keep = {path for item in open_items for path in _with_journal(item.partial_path(node))}
    sizes = {path: int(blocks) * 512 for blocks, _, path in (line.partition(" ") for line in lines)}
    stale = {path: size for path, size in sizes.items() if path not in keep}
    for place in sorted({path.partition(f"/{PARTIALS}/")[0] for path in stale}):
        own = {path: size for path, size in stale.items() if path.startswith(f"{place}/{PARTIALS}/")}
        yield _files_change(node, f"{place}/{PARTIALS}", "partial files", own)


def _with_journal(path: str) -> tuple[str, str]:
    return path, path + JOURNAL_SUFFIX


def _files_change(node: Node, place: str, what: str, sizes: Mapping[str, int]) -> Change:
    def act(work: Work) -> str:
        del work
        node.session.ask("remove", paths=list(sizes))
        node.host.run(["find", place, "-depth", "-type", "d", "-empty", "-delete"], check=False)
        return f"{len(sizes)} files are gone"

    return Change(node.role, STEP, place, what, "gone", act, size=sum(sizes.values()))


def _plan_caches(node: Node, wanted: Wanted, used: _Used, paths: list[str]) -> Iterator[Change]:
    """Rank caches of other weights, code compiled for other images, derived files of other sources."""
    stale = [path for path in paths if _ID.fullmatch(path.rpartition("/")[2]) and path not in wanted.folders]
    stale = [path for path in stale if not used.holds(path)]
    foreign = ["-not", "-user", str(node.identity["uid"]), "-print", "-quit"]
    commands = {path: ["du", "-sB1", "--", path] for path in stale}
    commands |= {f"owner {path}": ["find", path, *foreign] for path in stale}
    answers = node.session.ask("facts", commands=commands)["commands"] if stale else {}
    for path in stale:
        size = re.match(r"\d+", (answers[path] or {"out": ""})["out"])
        # What a container wrote as root only root can remove.
        as_root = node.identity["uid"] != 0 and bool((answers[f"owner {path}"] or {"out": "?"})["out"])
        action = partial(_remove_folder, node, path, node.host.sudo if as_root else node.host.run)
        lane = "sudo" if as_root else ""
        what = f"{path.split('/')[-2]} of other weights or images"
        yield Change(node.role, STEP, path, what, "gone", action, lane=lane, size=int(size[0]) if size else 0)


def removal(path: str) -> list[str]:
    """Give the command that removes a folder."""
    return ["rm", "-rf", "--one-file-system", "--", path]


def _remove_folder(node: Node, path: str, run: Callable[..., object], work: Work) -> str:
    del work
    run(removal(path), timeout=_SECONDS)
    left = node.session.ask("look", store=node.proofs_file, files=[{"path": path, "algorithm": ""}])[path]["kind"]
    if left != "missing":
        raise SparkserveError("prune_failed", f"{path} is still there", f"ls -la {path}", node.role)
    return "it is gone"


def _plan_images(node: Node, wanted: Wanted, used: _Used, images: list[dict[str, Any]]) -> Iterator[Change]:
    """Engine images of ours under other names, and unnamed ones that carry our label."""
    for image in sorted(images, key=lambda image: str(image["Id"])):  # those of one second come in no order
        tags = [tag for tag in image.get("RepoTags") or () if tag != "<none>:<none>"]
        ours = [tag for tag in tags if tag.startswith(_IMAGE_PREFIX) and tag not in wanted.images]
        unnamed = [] if tags or _IMAGE_LABEL not in (image.get("Labels") or {}) else [image["Id"]]
        for name in (*ours, *unnamed) if image["Id"] not in used.images else ():
            action = partial(_remove_image, node, name)
            yield Change(node.role, STEP, name, "engine image", "gone", action, lane="image", size=image["Size"])


def _remove_image(node: Node, name: str, work: Work) -> str:
    del work
    node.host.run(["docker", "image", "rm", name], timeout=_SECONDS)
    return "it is gone"


def plan_build_cache(node: Node) -> list[Change]:
    """Plan the removal of Docker's build cache as a whole: nothing in it tells whose build made a part."""
    before = _build_cache_bytes(node)

    def act(work: Work) -> str:
        from sparkserve.docker_client import explained

        del work
        with explained(node.role):
            node.docker.api.prune_builds(all=True)
        return f"{before - _build_cache_bytes(node)} bytes are gone"

    name, what = "Docker's build cache", "what builds of anybody left"
    return [Change(node.role, STEP, name, what, "gone", act, lane="image", size=before)] if before else []


def _build_cache_bytes(node: Node) -> int:
    """Add up what no running build uses and no image shares."""
    answer = node.session.ask("facts", docker=[_BUILD_CACHE])["docker"][_BUILD_CACHE]
    parts = docker_body(answer, node.role).get("BuildCache") or ()
    return sum(part["Size"] for part in parts if not part["InUse"] and not part["Shared"])


def plan_logs(runs_dir: Path) -> list[Change]:
    """Plan the removal of saved logs, those of the newest run apart."""

    def remove(files: list[Path], _work: Work) -> str:
        for file in files:
            file.unlink()
        return f"{len(files)} files are gone"

    old = {run: sorted((runs_dir / run).glob("rank[01].log")) for run in saved_runs(runs_dir)[1:]}
    return [
        Change("head", STEP, f"{runs_dir}/{run}", "saved logs", "gone", partial(remove, files), size=_size(files))
        for run, files in old.items()
    ]


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)
