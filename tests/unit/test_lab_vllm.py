"""The lab's wheels of vLLM: where they cannot be had, that is said, and nothing else is taken."""

import subprocess
from pathlib import Path

import pytest

from tests.lab import vllm
from tests.lab.machine import LabError


@pytest.mark.parametrize(
    ("lacking", "asked", "words"),
    [
        ("torch==", 1, r"pip finds no wheel torch==\S+\+cpu, the build for processors: give pip a place that has it"),
        ("--requirement=", 2, r"pip cannot fetch the wheels of \S+wheels\.txt"),
    ],
)
def test_a_wheel_that_pip_does_not_find_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str, asked: int, words: str
) -> None:
    wanted: list[str] = []

    def pip(word: str, folder: Path) -> subprocess.CompletedProcess[str]:
        assert folder == tmp_path
        wanted.append(word)
        return subprocess.CompletedProcess([], int(word.startswith(lacking)), "", "No matching distribution found")

    monkeypatch.setattr(vllm, "_pip", pip)
    with pytest.raises(LabError, match=rf"{words}.*\nNo matching distribution found") as caught:
        vllm._download(tmp_path)
    assert len(wanted) == asked, "the default build of torch is for CUDA, and must not be fetched instead"
    assert ("PIP_FIND_LINKS" in str(caught.value)) == (asked == 1)
