"""From recipe to lock: every source is looked up on the network, and all that cannot be had are told at once."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from sparkserve.errors import Failures, SparkserveError, usage_error
from sparkserve.git import lacks_commit, list_refs
from sparkserve.hosts import LocalHost
from sparkserve.hub import SHORT_COMMIT, WHOLE_COMMIT, list_files
from sparkserve.lock import Lock, LockedImage, LockedTemplate
from sparkserve.manifest import Manifest, ManifestFile
from sparkserve.recipe import ChatTemplate, Image, Recipe, Weights
from sparkserve.registry import find_digest, parse_reference
from sparkserve.settings import Settings

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

Found = TypeVar("Found")
# What the hub itself keeps as LFS: such a file without a sha256 is one whose hash is hidden from us.
_LARGE_SUFFIXES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx")
_PLAIN_LIMIT = 10 * 1024 * 1024


@dataclass(frozen=True)
class SourceRow:
    """One source for a table: what was asked for and what it resolved to."""

    kind: str
    source: str
    asked: str
    resolved: str
    files: int = 0
    size: int = 0


def resolve(recipe: Recipe, settings: Settings, report: Callable[[str], None]) -> Lock:
    """Resolve everything that a recipe leaves open; raise with one error for each source that cannot be had."""
    problems: list[SparkserveError] = []

    def attempt(what: str, find: Callable[[], Found]) -> Found | None:
        report(what)
        try:
            return find()
        except SparkserveError as error:
            problems.append(error)
            return None

    weights = [attempt(f"weights {item.repository}", partial(_find_weights, settings, item)) for item in recipe.weights]
    wanted = recipe.chat_template
    template = wanted and attempt(f"chat template {wanted.repository}", partial(_find_template, settings, wanted))
    image = LockedImage()
    if recipe.image.dockerfile:
        repository, revision = engine_source(recipe, settings)
        # An image may be made of its base and the recipe's own files alone.
        commit = repository and attempt(f"engine {repository}", partial(_find_engine, repository, revision))
        base = attempt(f"base image {recipe.image.base}", partial(_find_base, recipe.image))
        image = LockedImage(
            base=base or "", engine_repository=repository, engine_commit=commit or "", engine_asked=revision
        )
    else:
        reference = attempt("engine image", partial(_find_reference, recipe.image, settings))
        image = LockedImage(reference=reference or "")
    if problems:
        raise Failures(problems)
    manifests = tuple(manifest for manifest in weights if manifest is not None)
    return Lock(schema=1, recipe=recipe.name, weights=manifests, chat_template=template, image=image)


def engine_source(recipe: Recipe, settings: Settings) -> tuple[str, str]:
    """Give repository and revision of the engine: the owner's, or else the recipe's."""
    image = recipe.image
    return settings.engine_repository or image.engine_repository, settings.engine_revision or image.engine_revision


def describe(lock: Lock, recipe: Recipe, settings: Settings) -> list[SourceRow]:
    """List every source of a lock for a table."""
    asked = {weights.name: weights.revision for weights in recipe.weights}
    rows = [
        SourceRow(
            "weights", found.repository, asked.get(found.name, ""), found.commit, len(found.files), found.total_bytes
        )
        for found in lock.weights
    ]
    if lock.chat_template and recipe.chat_template:
        found = lock.chat_template
        wanted = recipe.chat_template.revision
        rows.append(SourceRow("chat template", found.repository, wanted, found.commit, 1, found.file.size))
    image = lock.image
    if image.reference:
        name, _, digest = image.reference.partition("@")
        rows.append(SourceRow("image", name, settings.image or recipe.image.reference, digest))
    else:
        repository, revision = engine_source(recipe, settings)
        rows += [SourceRow("engine", repository, revision, image.engine_commit)] if repository else []
        name, _, digest = image.base.partition("@")
        rows.append(SourceRow("base image", name, recipe.image.base_digest or recipe.image.base, digest))
    return rows


@dataclass(frozen=True)
class Difference:
    """What one source, or one file of it, was and is; empty where it was not or is not there."""

    source: str
    before: str
    after: str


def compare(old: Lock | None, new: Lock, recipe: Recipe, settings: Settings) -> list[Difference]:
    """List what differs between two locks: each source's commit or digest, then its files."""
    before = _named(old, recipe, settings) if old else {}
    after = _named(new, recipe, settings)
    every = (Difference(name, before.get(name, ""), after.get(name, "")) for name in {**before, **after})
    return [one for one in every if one.before != one.after]


def _named(lock: Lock, recipe: Recipe, settings: Settings) -> dict[str, str]:
    """Give everything that a lock pins by its name."""
    pinned = {f"{row.kind} {row.source}": row.resolved for row in describe(lock, recipe, settings)}
    for manifest in lock.weights:
        pinned |= {f"{manifest.name}/{file.path}": f"{file.algorithm}:{file.digest}" for file in manifest.files}
    return pinned


# -- the hub ----------------------------------------------------------------------------------------------------------


def _find_weights(settings: Settings, weights: Weights) -> Manifest:
    commit, siblings = list_files(settings, weights.repository, weights.revision)
    wanted = [path for path in sorted(siblings) if _is_wanted(path, weights)]
    where = f"{weights.repository} at {commit[:8]}"
    listed = "\n".join(wanted) or "\n".join(sorted(siblings))
    empty = [pattern for pattern in weights.include if not any(fnmatch.fnmatchcase(path, pattern) for path in wanted)]
    if empty:
        hint = f"look at `include` of the weights {weights.name} in the recipe"
        raise SparkserveError("files_missing", f"{where} has no file {', '.join(empty)}", hint, details=listed)
    if weights.files is not None and len(wanted) != weights.files:
        hint = f"look at the list; `files`, `include` and `exclude` of the weights {weights.name} decide"
        message = f"{where} has {len(wanted)} of the wanted files; needed: {weights.files}"
        raise SparkserveError("files_count", message, hint, details=listed)
    files = _prove_by_hash(settings, weights.repository, [siblings[path] for path in wanted])
    denied = [file.path for file in files if file.sha256 in weights.deny_sha256]
    if denied:
        message = f"{where}: {', '.join(denied)} has the content of an older release that must not be served"
        raise SparkserveError("files_denied", message, "look at `repository` and `revision` in the recipe")
    return Manifest(
        name=weights.name, repository=weights.repository, commit=commit, asked=weights.revision, files=tuple(files)
    )


def _is_wanted(path: str, weights: Weights) -> bool:
    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

    return matches(weights.include) and not matches(weights.exclude)


def _find_template(settings: Settings, template: ChatTemplate) -> LockedTemplate:
    commit, siblings = list_files(settings, template.repository, template.revision)
    if template.path not in siblings:
        message = f"{template.repository} at {commit[:8]} has no file {template.path}"
        raise SparkserveError("files_missing", message, "look at `path` of the chat template in the recipe")
    (file,) = _prove_by_hash(settings, template.repository, [siblings[template.path]])
    if template.git_sha1 and file.git_sha1 != template.git_sha1:
        message = f"{template.path} of {template.repository} has the git hash {file.git_sha1}"
        hint = "the template was changed at its source: look at it before you change `git_sha1` in the recipe"
        raise SparkserveError("template_differs", f"{message}; needed: {template.git_sha1}", hint)
    return LockedTemplate(repository=template.repository, commit=commit, asked=template.revision, file=file)


def _prove_by_hash(settings: Settings, repository: str, siblings: Sequence[RepoSibling]) -> list[ManifestFile]:
    """Turn the hub's listing into files with hashes; a hash that is hidden from us is refused, never guessed."""
    hidden = [sibling.rfilename for sibling in siblings if _is_hidden(sibling)]
    if hidden:
        message = f"{settings.hf_endpoint} hides the hashes of {len(hidden)} files of {repository} from us"
        hint = f"accept the terms at {settings.hf_endpoint}/{repository} and set HF_TOKEN in .env to that account's"
        raise SparkserveError("hub_hash_hidden", message, hint, details="\n".join(hidden))
    try:
        return [_to_file(sibling) for sibling in siblings]
    except ValidationError as error:
        message = f"{settings.hf_endpoint} lists a file of {repository} in a way that cannot be trusted"
        details = str(error.errors(include_url=False)[0]["msg"])
        raise SparkserveError("hub_failed", message, "look at HF_ENDPOINT", details=details) from error


def _is_hidden(sibling: RepoSibling) -> bool:
    if sibling.lfs is not None:
        return not sibling.lfs.sha256
    is_large = sibling.rfilename.endswith(_LARGE_SUFFIXES) or (sibling.size or 0) > _PLAIN_LIMIT
    return is_large or sibling.size is None or not sibling.blob_id


def _to_file(sibling: RepoSibling) -> ManifestFile:
    path = sibling.rfilename
    if sibling.lfs is not None:
        return ManifestFile(path=path, size=sibling.lfs.size, sha256=sibling.lfs.sha256, git_sha1=None)
    return ManifestFile(path=path, size=sibling.size or 0, sha256=None, git_sha1=sibling.blob_id)


# -- git and images ---------------------------------------------------------------------------------------------------


def _find_engine(repository: str, revision: str) -> str:
    if re.match(r"https?://[^/]*@", repository):
        message = "SPARKSERVE_ENGINE_REPOSITORY holds a user or token, which would end up in the lock and the image"
        raise usage_error("engine_secret", message, "take it out of the address; git's credential helper can hold it")
    refs = list_refs(LocalHost("head"), repository)
    if WHOLE_COMMIT.fullmatch(revision):
        if revision not in refs.values() and lacks_commit(LocalHost("head"), repository, revision):
            message = f"the engine's repository {repository} has no commit {revision}"
            hint = "look at `engine_revision` in the recipe, or at SPARKSERVE_ENGINE_REVISION"
            raise SparkserveError("engine_revision", message, hint)
        return revision
    commit = pick_commit(refs, revision)
    if commit is None:
        names = [name.split("/", 2)[2] for name in refs if name.startswith(("refs/heads/", "refs/tags/"))]
        message = f"the engine's repository {repository} has no branch or tag {revision}"
        hint = "set SPARKSERVE_ENGINE_REVISION to one of its branches or tags, or to a commit of 40 hex digits"
        raise SparkserveError("engine_revision", message, hint, details="\n".join(names[:40]))
    return commit


def pick_commit(refs: Mapping[str, str], revision: str) -> str | None:
    """Find what a branch, a tag (the commit behind it) or the beginning of a commit names."""
    for name in (f"refs/heads/{revision}", f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}"):
        if name in refs:
            return refs[name]
    if not SHORT_COMMIT.fullmatch(revision):
        return None
    found = {commit for commit in refs.values() if commit.startswith(revision)}
    return found.pop() if len(found) == 1 else None


def _find_base(image: Image) -> str:
    """Pin the base image, and prove that its registry has it."""
    reference = parse_reference(image.base)
    if image.base_digest:
        reference = replace(reference, digest=image.base_digest)
    return f"{reference.name}@{find_digest(reference)}"


def _find_reference(image: Image, settings: Settings) -> str:
    """Prove that a finished image can be had; only a digest names one for good."""
    text = settings.image or image.reference
    if not text:
        message = "this recipe names no engine image"
        raise usage_error("image_unset", message, f"set SPARKSERVE_IMAGE in .env; {image.reference_help}".rstrip("; "))
    if text.startswith("sha256:"):  # the id of an image that the nodes have, or nobody has
        return text
    reference = parse_reference(text)
    digest = find_digest(reference)
    if not reference.digest:
        message = f"{text} can be another image tomorrow; needed: a digest"
        raise usage_error("image_unpinned", message, f"SPARKSERVE_IMAGE={reference.name}@{digest}")
    return f"{reference.name}@{digest}"
