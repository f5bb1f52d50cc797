"""Recipes by git address and commit: fetched once, shown, trusted by commit; confined to their own files."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkserve import state_file
from sparkserve.errors import SparkserveError, usage_error
from sparkserve.git import export_commit, fetch_commit
from sparkserve.hosts import LocalHost
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe, templates_dir

PREFIX = "git+"
_ADDRESS = re.compile(
    r"git\+(?P<repository>(?:https?|ssh|file)://\S+)@(?P<commit>[0-9a-f]{40})(?:#(?P<folder>[\w./-]+))?"
)
_CAPABILITIES = {"IPC_LOCK", "SYS_NICE", "SYS_PTRACE"}
_DEVICE = re.compile(r"/dev/(infiniband|dri)(/[\w-]+)*")
# Other settings of memory take a protection away, such as vm.mmap_min_addr.
_SYSCTLS = {
    "vm.swappiness",
    "vm.compaction_proactiveness",
    "vm.min_free_kbytes",
    "vm.watermark_scale_factor",
    "vm.watermark_boost_factor",
}
# Always two below the cache: in a directory that it may write, a container could put a link where a later mount begins.
# Beside these lies what git and we ourselves read there.
_CACHE = re.compile(r"\$\{cache\}/(ranks|maps|code)/([\w-]|\$\{(weights\.id|image\.id|rank)\})+")


@dataclass(frozen=True)
class GitRecipe:
    """Where a recipe is in a repository, and where its files are here."""

    address: str
    repository: str
    commit: str
    directory: Path
    checkout: Path


def locate(address: str, state: Path) -> GitRecipe:
    """Take a git address apart; only a whole commit names the same files for good."""
    match = _ADDRESS.fullmatch(address)
    if match is None or ".." in (match["folder"] or "").split("/"):
        message = f"{address}: should be git+https://HOST/REPOSITORY@<40 hex digits of a commit>#DIRECTORY"
        raise usage_error("recipe_address", message, "`git ls-remote` shows the commits of branches and tags")
    checkout = state / "recipes" / match["commit"]
    return GitRecipe(address, match["repository"], match["commit"], checkout / (match["folder"] or ""), checkout)


def load_trusted(address: str, state: Path) -> Recipe:
    """Read a recipe that was fetched, shown and trusted before; no network is needed."""
    found = locate(address, state)
    if address not in _trusted(state) or not found.directory.is_dir():
        message = f"the recipe {address} was not looked at yet"
        raise usage_error("recipe_untrusted", message, f"sparkserve recipes add {address}")
    return _load(found)


def fetch(address: str, state: Path) -> Recipe:
    """Bring the files of one commit here and read the recipe; nothing is trusted yet."""
    found = locate(address, state)
    if not found.checkout.is_dir():
        host, place = LocalHost("head"), state / "recipes"
        beside = place / f".{found.commit}.new"
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True, mode=0o700)
        try:
            repository = fetch_commit(host, found.repository, found.commit, str(place), _go_on)
            export_commit(host, repository, found.commit, str(beside), _go_on)
        except SparkserveError as error:
            message = f"cannot fetch the recipe {address}"
            raise usage_error("recipe_unreachable", message, f"git ls-remote {found.repository}") from error
        _refuse_links(beside)
        (beside / "engine").rename(found.checkout)
        beside.rmdir()
    return _load(found)


def trust(address: str, state: Path) -> None:
    """Remember that the owner looked at this commit."""
    state_file.write(_trust_file(state), {"addresses": sorted({*_trusted(state), address})})


def _trusted(state: Path) -> list[str]:
    found: list[str] = state_file.read(_trust_file(state)).get("addresses", [])
    return found


def _trust_file(state: Path) -> Path:
    return state / "recipes" / "trusted.json"


def _go_on() -> None:
    """Nothing interrupts a fetch but Ctrl-C itself."""


def _refuse_links(directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            shutil.rmtree(directory)
            message = f"the repository holds {path.relative_to(directory)}, which is no plain file"
            raise usage_error("recipe_link", message, "a recipe from git may hold files and directories only")


def _load(found: GitRecipe) -> Recipe:
    recipe = load_recipe(str(found.directory))
    inside = (found.checkout.resolve(), (templates_dir() / "recipes").resolve())
    outside = [path for path in recipe.directories if not any(path.resolve().is_relative_to(root) for root in inside)]
    problems = [f"extends {path}, outside of its repository" for path in outside]
    problems += [*_reached_by_containers(recipe), *_reached_beside_containers(recipe), *_hidden(recipe)]
    if problems:
        message = f"the recipe {found.address} {'; '.join(problems)}"
        raise usage_error("recipe_reaches_out", message, "copy it to a directory, look at it, and name its path")
    return recipe


def _reached_by_containers(recipe: Recipe) -> Iterator[str]:
    """List what the containers would be given of a node beyond caches of their own."""
    box = recipe.container
    yield from (f"mounts {m.source} of the node" for m in box.mounts if not _CACHE.fullmatch(m.source))
    yield from (f"wants the device {name}" for name in box.devices if not _DEVICE.fullmatch(name))
    yield from (f"wants the capability {name}" for name in box.capabilities if name not in _CAPABILITIES)


def _reached_beside_containers(recipe: Recipe) -> Iterator[str]:
    """List what we would read or set for it on a node, outside of any container."""
    engine, files = recipe.image.engine_repository, recipe.readiness.warm_files
    if not re.match(r"https?://|$", engine):  # others name a directory here, or a login of the owner's
        yield f"takes the engine from {engine}"
    if files and (not files.startswith("${cache}/") or ".." in files):
        yield f"looks for {files} on the node"
    yield from (f"sets {name}" for name in recipe.tuning.sysctl if name not in _SYSCTLS)


def _hidden(recipe: Recipe) -> Iterator[str]:
    """List what a terminal would obey and not show, and so could hide other lines from the owner who is asked."""
    name = recipe.image.dockerfile
    texts = [*_texts(recipe.model_dump()), recipe.file(name).decode(errors="replace") if name else ""]
    hidden = sorted({character for text in texts for character in text if not character.isprintable()} - {"\n", "\t"})
    if hidden:
        yield f"holds the character {hidden[0]!a}, which a terminal does not show"


def _texts(data: object) -> Iterator[str]:
    if isinstance(data, Mapping):
        data = [*data.items()]
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from _texts(item)
    elif isinstance(data, str):
        yield data
