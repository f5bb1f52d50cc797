"""The exact commands of both ranks of every recipe, the lab's too; a change of a recipe shows here as a difference."""

from __future__ import annotations

import difflib
import os
from collections import defaultdict
from pathlib import Path

import pytest

from sparkserve.blueprint import Place, Seen, draw
from sparkserve.docker_form import docker_run_argv
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe, shipped_names
from sparkserve.settings import Settings
from tests.lab.recipe import write_recipe

SHIPPED = shipped_names()
LAB = ("lab", "lab-vllm-cpu")
GOLDEN = Path(__file__).parent.parent / "golden"
UPDATE = "UPDATE_GOLDEN=1 python -m pytest tests/unit/test_recipe_golden.py"
SEEN = Seen(
    seconds=0,
    nodes={
        "head": Place(
            home="/home/spark",
            address="10.100.8.1",
            interface="enp1s0f1np1",
            hcas=("rocep1s0f1", "roceP2p1s0f1"),
            gid_index=3,
        ),
        "worker": Place(
            home="/home/spark",
            address="10.100.8.2",
            interface="enp1s0f0np0",
            hcas=("rocep1s0f0", "roceP2p1s0f0"),
            gid_index=5,
        ),
    },
)


def commands(recipe: Recipe) -> dict[Path, str]:
    """Render before anything is locked: the digest of named places says nothing, so it is left out."""
    drawn = draw(Settings(), recipe, None, SEEN)
    return {
        GOLDEN / f"{recipe.name}.rank{rank}.txt": "\n".join(
            word for word in docker_run_argv(spec) if not word.startswith("--label=sparkserve.spec=")
        )
        + "\n"
        for rank, spec in enumerate(drawn.specs.values())
    }


def find_recipe(name: str, directory: Path) -> Recipe:
    if name in SHIPPED:
        return load_recipe(name)
    values = defaultdict(lambda: "0" * 40, MODEL="lab/tiny", BASE="registry.lab/base:1", LAB_DIR="/var/lib/lab")
    write_recipe(directory / name, name, values)
    return load_recipe(str(directory / name))


@pytest.mark.parametrize("name", [*SHIPPED, *LAB])
def test_the_commands_of_a_recipe_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    differences: list[str] = []
    for path, text in commands(find_recipe(name, tmp_path)).items():
        if os.environ.get("UPDATE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        differences += difflib.unified_diff(old.splitlines(), text.splitlines(), path.name, f"{path.name} now", "", "")
    assert not differences, "\n".join([*differences, f"{UPDATE} writes them"])


def test_no_golden_file_is_without_its_recipe() -> None:
    files = {path.name for path in GOLDEN.glob("*.txt")}
    assert files == {f"{name}.rank{rank}.txt" for name in (*SHIPPED, *LAB) for rank in (0, 1)}
