"""What a recipe resolved to: commits, files with hashes, digests; from here on no network is needed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from sparkserve import state_file
from sparkserve.errors import Failures, SparkserveError, usage_error
from sparkserve.manifest import REPOSITORY, Manifest, ManifestFile
from sparkserve.recipe import Data, Recipe
from sparkserve.settings import Settings

NAME = "sparkserve.lock.json"


class LockedTemplate(Data):
    """The chat template: one file of one repository at one commit."""

    repository: str = Field(pattern=REPOSITORY)
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    asked: str = Field("", description="Revision that was resolved to the commit")
    file: ManifestFile


class LockedImage(Data):
    """What the engine image is made of, or which finished one it is."""

    base: str = Field("", description="Base image as name@sha256:…", pattern=r"^([^-\s]\S*)?$")
    engine_repository: str = ""
    engine_commit: str = Field("", pattern=r"^([0-9a-f]{40})?$")
    engine_asked: str = Field("", description="Revision that was resolved to the engine's commit")
    reference: str = Field("", description="Finished image as name@sha256:…", pattern=r"^([^-\s]\S*)?$")


class Lock(Data):
    """All that a recipe leaves open, resolved once."""

    schema_version: Literal[1] = Field(1, alias="schema")
    recipe: str
    weights: tuple[Manifest, ...]
    chat_template: LockedTemplate | None = None
    image: LockedImage

    @property
    def total_bytes(self) -> int:
        """Size of all weights, in bytes."""
        return sum(manifest.total_bytes for manifest in self.weights)

    @property
    def weights_id(self) -> str:
        """Short digest of all weights commits."""
        text = "\n".join(f"{manifest.repository}@{manifest.commit}" for manifest in self.weights)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class OpenLock(Lock):
    """Stands in where nothing is resolved yet, so that a plan can be shown: what is not known is a named place."""

    @property
    def weights_id(self) -> str:
        """See `Lock`."""
        return "<weights.id>"


def open_lock(recipe: Recipe) -> OpenLock:
    """Make the lock of a recipe before anything is looked up: each source at its asked revision, `*` for its files."""
    every = ManifestFile.model_construct(path="*", size=0, sha256=None, git_sha1=None)
    weights = [
        Manifest.model_construct(name=item.name, repository=item.repository, commit=item.revision, files=(every,))
        for item in recipe.weights
    ]
    return OpenLock.model_construct(schema_version=1, recipe=recipe.name, weights=tuple(weights), image=LockedImage())


def lock_path(env_file: Path) -> Path:
    """Give the lock's place: beside the settings file."""
    return env_file.parent / NAME


def read_lock(path: Path, recipe: Recipe, settings: Settings) -> Lock | None:
    """Read a lock and refuse one that belongs to other sources; None where neither we nor the recipe have one."""
    lock = _parse(path)
    if lock is None:
        own = _parse(recipe.directories[0] / NAME)
        # With an image or an engine of the owner's choice, the recipe's own lock is not the whole answer.
        return None if own is None or find_disagreements(own, recipe, settings) else own
    problems = find_disagreements(lock, recipe, settings)
    if problems:
        raise Failures(problems)
    return lock


def peek(path: Path) -> Lock | None:
    """Read a lock to compare another one with; None where there is none that can be read."""
    try:
        return _parse(path)
    except SparkserveError:
        return None


def read_others(path: Path) -> list[Lock]:
    """Read every other lock beside this one: those of the settings' recipe and of recipes named for one run."""
    beside = sorted(path.parent.glob("sparkserve.*lock.json"))
    return [lock for other in beside if other.name != path.name and (lock := _parse(other)) is not None]


def recipe_of(path: Path) -> str:
    """Tell which recipe a lock is of; empty where there is none that can be read."""
    found = peek(path)
    return found.recipe if found else ""


def _parse(path: Path) -> Lock | None:
    try:
        return Lock.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        hint = "look at its owner and mode; without it `sparkserve lock` makes a new one"
        raise usage_error("lock_unreadable", f"cannot read {path}: {error}", hint) from error
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = ": ".join(filter(None, (f"{path} is broken", where, first["msg"])))
        raise usage_error("lock_broken", message, "`sparkserve lock --update` makes it anew") from error


def write_lock(path: Path, lock: Lock) -> None:
    """Write the lock as a whole, so that it survives a power cut."""
    text = json.dumps(lock.model_dump(by_alias=True, exclude_none=True), indent=1) + "\n"
    try:
        state_file.write_text(path, text, durable=True)
    except OSError as error:
        hint = f"look at the owner and mode of {path.parent.absolute()}"
        raise usage_error("lock_unwritable", f"cannot write {path}: {error.strerror}", hint) from error


def find_disagreements(lock: Lock, recipe: Recipe, settings: Settings) -> list[SparkserveError]:
    """List where a lock is not of this recipe and these settings."""
    found = [f"it locks recipe {lock.recipe}, not {recipe.name}"] if lock.recipe != recipe.name else []
    found += [*_other_weights(lock, recipe), *_other_template(lock, recipe)]
    found += _other_engine(lock.image, recipe, settings) if recipe.image.dockerfile else []
    reference = settings.image or recipe.image.reference
    if not recipe.image.dockerfile and lock.image.reference.rpartition("@")[2] != reference.rpartition("@")[2]:
        found.append(f"it locks image {lock.image.reference}, not {reference}")
    hint = "`sparkserve lock --update` resolves the sources anew"
    return [usage_error("lock_differs", f"the lock does not fit: {text}", hint) for text in found]


def _other_weights(lock: Lock, recipe: Recipe) -> Iterator[str]:
    locked = {manifest.name: manifest for manifest in lock.weights}
    if set(locked) != {weights.name for weights in recipe.weights}:
        yield f"it locks the weights {', '.join(sorted(locked))}"
    for weights in recipe.weights:
        manifest = locked.get(weights.name)
        if manifest is None:
            continue
        if not _is_source(manifest, weights.repository, weights.revision):
            wanted = f"{weights.repository} at {weights.revision}"
            yield f"it locks {manifest.repository} at {manifest.commit}, the recipe wants {wanted}"
        if weights.files not in (None, len(manifest.files)):
            yield f"it locks {len(manifest.files)} files of {manifest.repository}, the recipe wants {weights.files}"
        yield from _denied(manifest, weights.deny_sha256)


def _other_template(lock: Lock, recipe: Recipe) -> Iterator[str]:
    found, wanted = lock.chat_template, recipe.chat_template
    if found is None or wanted is None:
        if found or wanted:
            yield f"it locks {'a' if found else 'no'} chat template"
        return
    if not _is_source(found, wanted.repository, wanted.revision):
        yield f"it locks the chat template of {found.repository} at {found.commit}"
    elif found.file.path != wanted.path or wanted.git_sha1 not in (None, found.file.git_sha1):
        yield f"it locks the chat template {found.file.path} with the git hash {found.file.git_sha1}"


def _other_engine(image: LockedImage, recipe: Recipe, settings: Settings) -> Iterator[str]:
    repository = settings.engine_repository or recipe.image.engine_repository
    revision = settings.engine_revision or recipe.image.engine_revision
    if image.engine_repository != repository or not _is_at(image.engine_commit, image.engine_asked, revision):
        yield f"it locks engine {image.engine_repository} at {image.engine_commit}, not {repository} at {revision}"
    name, _, digest = image.base.partition("@")
    base = recipe.image.base.partition("@")[0]
    if base != name and not base.startswith(f"{name}:"):
        yield f"it locks base image {name}, not {base}"
    elif recipe.image.base_digest not in ("", digest):
        yield f"it locks base image {image.base}, not {recipe.image.base_digest}"


def _denied(manifest: Manifest, deny_sha256: tuple[str, ...]) -> list[str]:
    return [
        f"{file.path} has the hash of a file that must not be served (an older release of the same size)"
        for file in manifest.files
        if file.sha256 in deny_sha256
    ]


def _is_source(locked: Manifest | LockedTemplate, repository: str, revision: str) -> bool:
    return locked.repository == repository and _is_at(locked.commit, locked.asked, revision)


def _is_at(commit: str, asked: str, revision: str) -> bool:
    """Whether a commit is what a revision names: by its digits, or as a branch or tag that was asked for then."""
    if re.fullmatch(r"[0-9a-f]{7,40}", revision):
        return commit.startswith(revision) or (len(revision) < 40 and asked == revision)
    return asked in ("", revision)
