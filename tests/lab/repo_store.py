"""A model repository on disk: content-addressed blobs, commits that list them, branches that name commits."""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

SHORTEST_PREFIX = 7
_HEX = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True)
class Entry:
    """One file of a commit; `sha256` is set only where the content is kept as LFS."""

    path: str
    size: int
    blob_id: str
    sha256: str | None = None

    @property
    def etag(self) -> str:
        """What a hub sends as this file's ETag."""
        return self.sha256 or self.blob_id

    @property
    def pointer_size(self) -> int:
        """Size of the LFS pointer that git itself keeps."""
        return len(lfs_pointer(self.sha256 or "", self.size))


def lfs_pointer(sha256: str, size: int) -> bytes:
    """Return the text that git keeps in place of an LFS file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def git_blob_id(content: bytes) -> str:
    """Return the id that git gives to a blob of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class ModelRepo:
    """One repository `org/name` below a root that holds many."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name

    @cached_property
    def directory(self) -> Path:
        """Where this repository lives."""
        return self.root / self.name

    @property
    def exists(self) -> bool:
        """Whether something was ever committed here."""
        return (self.directory / "refs.json").is_file()

    @property
    def head(self) -> str:
        """The commit that `main` names on disk."""
        return self.branches()["main"]

    def store(self, path: str, chunks: Iterable[bytes], *, lfs: bool) -> Entry:
        """Write one blob, hashing on the way, and return its entry."""
        blobs = self.directory / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        if not lfs:
            content = b"".join(chunks)
            entry = Entry(path, len(content), git_blob_id(content))
            (blobs / entry.etag).write_bytes(content)
            return entry
        digest, size = hashlib.sha256(), 0
        with tempfile.NamedTemporaryFile(dir=blobs, delete=False) as file:
            os.fchmod(file.fileno(), 0o644)
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
        sha256 = digest.hexdigest()
        Path(file.name).replace(blobs / sha256)
        return Entry(path, size, git_blob_id(lfs_pointer(sha256, size)), sha256)

    def commit(self, entries: Iterable[Entry], *, branch: str | None = "main") -> str:
        """Record a commit, whose id depends on its content alone, and move `branch` to it."""
        listed = sorted(entries, key=lambda entry: entry.path)
        text = "".join(f"{entry.blob_id} {entry.path}\n" for entry in listed)
        commit = hashlib.sha1(text.encode()).hexdigest()
        commits = self.directory / "commits"
        commits.mkdir(parents=True, exist_ok=True)
        _write_json(commits / f"{commit}.json", [asdict(entry) for entry in listed])
        if branch is not None:
            self.move_branch(branch, commit)
        return commit

    def change(self, path: str, content: bytes | None, *, branch: str | None = None) -> str:
        """Commit `main` with one file replaced (or removed, for None); no branch moves unless named."""
        entries = self.entries(self.head)
        before = entries.pop(path, None)
        if content is not None:
            entries[path] = self.store(path, [content], lfs=before is not None and before.sha256 is not None)
        return self.commit(entries.values(), branch=branch)

    def move_branch(self, branch: str, commit: str) -> None:
        """Let `branch` name `commit` from now on."""
        _write_json(self.directory / "refs.json", {**(self.branches() if self.exists else {}), branch: commit})

    def branches(self) -> dict[str, str]:
        """Return the commit of every branch."""
        refs: dict[str, str] = json.loads((self.directory / "refs.json").read_text())
        return refs

    def commits(self) -> list[str]:
        """Return the ids of all commits."""
        return sorted(file.stem for file in (self.directory / "commits").glob("*.json"))

    def resolve(self, revision: str) -> str | None:
        """Return the commit that a branch, a full id or a prefix of at least seven digits names alone."""
        branch = self.branches().get(revision)
        if branch is not None or not _HEX.fullmatch(revision):
            return branch
        found = [commit for commit in self.commits() if commit.startswith(revision)]
        return found[0] if len(found) == 1 else None

    def entries(self, commit: str) -> dict[str, Entry]:
        """Return the files of a commit by path."""
        listed = json.loads((self.directory / "commits" / f"{commit}.json").read_text())
        return {item["path"]: Entry(**item) for item in listed}

    def blob(self, entry: Entry) -> Path:
        """Return where the content of an entry lies."""
        return self.directory / "blobs" / entry.etag

    def source(self, path: str, revision: str = "main") -> Path:
        """Return the content of one file at a revision, to compare a download with."""
        commit = self.resolve(revision)
        if commit is None:
            raise KeyError(revision)
        return self.blob(self.entries(commit)[path])


def _write_json(path: Path, value: object) -> None:
    """Replace a file in one step: a running hub may be reading it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(value, indent=1))
    fresh.replace(path)
