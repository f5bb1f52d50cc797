"""The lab's recipes, filled in with the commits and addresses of the lab that runs."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from tests.lab.model_repo import ENGRAM_NAME, MODEL_NAME, TEMPLATE_NAME
from tests.lab.repo_store import git_blob_id

RECIPES = Path(__file__).parent / "recipes"
TEMPLATE = Path(__file__).parent / "chat_template.jinja"
_MARK = re.compile(r"@([A-Z_0-9]+)@")


def write_lab_recipe(
    directory: Path, *, commits: Mapping[str, str], engine_repository: str, base: str, lab_dir: str = "/var/lib/lab"
) -> None:
    """Write the stand-in engine's recipe; `commits` are those of the lab's repositories, `lab_dir` is on both nodes."""
    values = {
        "MODEL_COMMIT": commits[MODEL_NAME],
        "ENGRAM_COMMIT": commits[ENGRAM_NAME],
        "TEMPLATE_COMMIT": commits[TEMPLATE_NAME],
        "TEMPLATE_SHA1": git_blob_id(TEMPLATE.read_bytes()),
        "ENGINE_REPOSITORY": engine_repository,
        "BASE": base,
        "LAB_DIR": lab_dir,
    }
    write_recipe(directory, "lab", values)


def write_recipe(directory: Path, name: str, values: Mapping[str, str]) -> None:
    """Write one of the lab's recipes with its marks filled in."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(RECIPES / name, directory)
    text = (RECIPES / name / "recipe.toml").read_text()
    (directory / "recipe.toml").write_text(_MARK.sub(lambda match: values[match[1]], text))
