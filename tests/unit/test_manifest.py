from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sparkserve.manifest import FileFacts, Manifest, ManifestFile, find_problem, is_proved
from tests.unit.cases import read_rows, row_name

SHA256 = "a" * 64
SHA1 = "c" * 40


def make_manifest(*files: ManifestFile, repository: str = "org/name", commit: str = "1" * 40) -> Manifest:
    return Manifest(name="model", repository=repository, commit=commit, files=files)


@pytest.mark.parametrize("case", read_rows("manifest", "paths"), ids=row_name)
def test_paths_stay_inside(case: dict[str, Any]) -> None:
    try:
        ManifestFile(path=case["path"], size=1, sha256=SHA256)
        accepted = True
    except ValidationError:
        accepted = False
    assert accepted == case["accepted"]


@pytest.mark.parametrize("case", read_rows("manifest", "problems"), ids=row_name)
def test_problems(case: dict[str, Any]) -> None:
    file, facts = ManifestFile(path="f", size=10, sha256=SHA256), FileFacts(**case["facts"])
    assert (find_problem(file, facts), is_proved(file, facts)) == (case["problem"], case["proved"])


@pytest.mark.parametrize(
    "digest", [{}, {"sha256": None}, {"sha256": ""}, {"sha256": "a" * 63}, {"sha256": "x" + SHA256}]
)
def test_a_file_without_a_hash_is_refused(digest: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ManifestFile(path="f", size=10, **digest)


def test_the_strong_hash_is_the_proof() -> None:
    both = ManifestFile(path="f", size=1, sha256=SHA256, git_sha1=SHA1)
    plain = ManifestFile(path="f", size=1, git_sha1=SHA1)
    assert (both.algorithm, both.digest) == ("sha256", SHA256)
    assert (plain.algorithm, plain.digest) == ("git-sha1", SHA1)
    assert not is_proved(both, FileFacts("file", 1, SHA1))


@pytest.mark.parametrize(
    "repository", ["../..", "org", "org/../x", "/org/x", "org/x/y", "org/..", "./x", "org/x\n", ""]
)
def test_a_repository_stays_inside(repository: str) -> None:
    with pytest.raises(ValidationError):
        make_manifest(repository=repository)


@pytest.mark.parametrize(
    "commit", ["main", "1" * 39, "1" * 41, "../" + "1" * 40, "1" * 40 + "/..", "A" * 40, "1" * 40 + "\n"]
)
def test_a_commit_is_forty_hex_digits(commit: str) -> None:
    with pytest.raises(ValidationError):
        make_manifest(commit=commit)


def test_a_file_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="named twice"):
        make_manifest(ManifestFile(path="f", size=1, sha256=SHA256), ManifestFile(path="f", size=2, sha256=SHA256))


def test_where_a_manifest_lies_and_how_much_it_is() -> None:
    manifest = make_manifest(*(ManifestFile(path=name, size=10, sha256=SHA256) for name in "abcd"))
    assert (manifest.total_bytes, manifest.directory) == (40, f"org/name/{'1' * 40}")
