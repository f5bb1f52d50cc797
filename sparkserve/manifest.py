"""Which files make up a set of weights, with size and hash at one commit; comparing is pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

# pydantic searches for a pattern anywhere in a text: without both ends it would accept whatever holds a match.
REPOSITORY = r"^\w[\w.-]*/\w[\w.-]*$"
Algorithm = Literal["sha256", "git-sha1"]
Problem = Literal["missing", "link", "not a file", "short", "long", "wrong content", "unreadable"]


class ManifestFile(BaseModel):
    r"""One file: path within the repository, size in bytes, and the hash the hub publishes for it.

    Large files (LFS) have a sha256; plain ones only git's blob hash, sha1 over `blob <size>\0` and the content.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size: int = Field(ge=0)
    sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")
    git_sha1: str | None = Field(None, pattern=r"^[0-9a-f]{40}$")

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        parts = value.split("/")
        if value.startswith("/") or any(part in ("", ".", "..") for part in parts) or re.search(r"[\x00-\x1f]", value):
            raise ValueError("should be a plain relative path")
        return value

    @model_validator(mode="after")
    def _has_a_hash(self) -> ManifestFile:
        if self.sha256 is None and self.git_sha1 is None:
            raise ValueError(f"{self.path} has no hash to prove it by")
        return self

    @property
    def algorithm(self) -> Algorithm:
        """Which hash proves this file."""
        return "sha256" if self.sha256 else "git-sha1"

    @property
    def digest(self) -> str:
        """The hash, in hex."""
        return self.sha256 or self.git_sha1 or ""


class Manifest(BaseModel):
    """The files of one weights source at one commit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    repository: str = Field(pattern=REPOSITORY)
    commit: str = Field(pattern=r"^[0-9a-f]{40}$")
    asked: str = Field("", description="Revision that was resolved to the commit")
    files: tuple[ManifestFile, ...]

    @model_validator(mode="after")
    def _names_each_file_once(self) -> Manifest:
        if len({file.path for file in self.files}) != len(self.files):
            raise ValueError("a file is named twice")
        return self

    @property
    def total_bytes(self) -> int:
        """Size of all files together, in bytes."""
        return sum(file.size for file in self.files)

    @property
    def directory(self) -> str:
        """Where the files live below the models directory: `<org>/<name>/<commit>`."""
        return f"{self.repository}/{self.commit}"


@dataclass(frozen=True)
class FileFacts:
    """What was observed of one file on a node; `digest` is None while it is not known."""

    kind: Literal["file", "link", "other", "missing", "unreadable"]
    size: int = 0
    digest: str | None = None


def find_problem(file: ManifestFile, facts: FileFacts) -> Problem | None:
    """Say what is wrong with a file; None when it is proved, or when only its hash is not known yet."""
    if facts.kind != "file":
        problems: dict[str, Problem] = {"link": "link", "other": "not a file", "unreadable": "unreadable"}
        return problems.get(facts.kind, "missing")
    if facts.size != file.size:
        return "short" if facts.size < file.size else "long"
    if facts.digest is not None and facts.digest != file.digest:
        return "wrong content"
    return None


def is_proved(file: ManifestFile, facts: FileFacts) -> bool:
    """Whether a file is a regular file of the right size and hash."""
    return find_problem(file, facts) is None and facts.digest == file.digest
