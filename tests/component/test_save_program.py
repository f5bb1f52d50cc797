"""The program between `docker save` and the stream, run as the head runs it: by its text, with Python alone."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from sparkserve import save_program

MIB = 1 << 20


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "saved.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as saved:
        for name in ("one", "two"):
            folder = tarfile.TarInfo(f"{name}/")
            folder.type, folder.mtime = tarfile.DIRTYPE, 1.5
            saved.addfile(folder)
            layer = tarfile.TarInfo(f"{name}/layer.tar")
            layer.size = 3 * MIB + 5
            saved.addfile(layer, io.BytesIO(name.encode() * layer.size))
        link = tarfile.TarInfo("three/layer.tar")
        link.type, link.linkname = tarfile.SYMTYPE, "../two/layer.tar"
        saved.addfile(link)
        saved.addfile(tarfile.TarInfo("manifest.json"))
    return path


def run(names: str, *argv: str) -> subprocess.CompletedProcess[bytes]:
    program = Path(save_program.__file__).read_text(encoding="utf-8")
    return subprocess.run([sys.executable, "-I", "-c", program, names, *argv], capture_output=True, check=False)


def test_named_files_are_left_out_and_everything_else_stays(archive: Path) -> None:
    answer = run("one/layer.tar blobs/sha256/none", "cat", str(archive))
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert len(answer.stdout) < 4 * MIB
    with tarfile.open(archive) as whole, tarfile.open(fileobj=io.BytesIO(answer.stdout)) as thin:
        kept = [member for member in whole if member.name != "one/layer.tar"]
        assert [member.get_info() for member in kept] == [member.get_info() for member in thin]
        for member in kept:
            if member.isreg():
                before, after = whole.extractfile(member), thin.extractfile(member.name)
                assert before is not None
                assert after is not None
                assert before.read() == after.read()


@pytest.mark.parametrize(
    ("script", "code", "words"),
    [
        ("echo no such image >&2; exit 3", 3, b"no such image"),
        ('head -c 4000000 "$1"; echo the disk is full >&2; exit 4', 4, b"the disk is full"),
        ('head -c 4000000 "$1"', 1, b"not an archive: unexpected end of data"),
        ('cat "$1"; exit 5', 5, b""),
    ],
)
def test_half_an_archive_is_a_failure(archive: Path, script: str, code: int, words: bytes) -> None:
    answer = run("one/layer.tar", "sh", "-c", script, "sh", str(archive))
    assert answer.returncode == code
    assert words in answer.stderr
    assert b"Traceback" not in answer.stderr
