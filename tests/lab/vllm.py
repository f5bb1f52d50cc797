"""Real vLLM for the lab: its wheels as an engine's repository, a tiny model on the hub, and a recipe of both."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab.git_area import publish_directory
from tests.lab.machine import LabError, command
from tests.lab.pair import HOME, Pair
from tests.lab.recipe import RECIPES, write_recipe
from tests.lab.vllm_model import NAME, make_repository

RECIPE = "lab-vllm-cpu"
WHEELS = RECIPES / RECIPE / "wheels.txt"


def furnish(pair: Pair) -> None:
    """Give the pair all that real vLLM needs, and make it the owner's choice."""
    repos = pair.lab.folder / "repos"
    values = {
        "MODEL": NAME,
        "MODEL_COMMIT": make_repository(repos),
        "BASE": pair.lab.registry_reference,
        "ENGINE_REPOSITORY": f"{pair.hub.endpoint}/smart-git/{RECIPE}.git",
        "ENGINE_COMMIT": publish_directory(repos, RECIPE, wheelhouse(pair.lab.folder / "cache")),
    }
    directory = pair.lab.folder / "recipes" / RECIPE
    write_recipe(directory, RECIPE, values)
    pair.put_recipe(directory)
    choose(pair)


def choose(pair: Pair) -> None:
    """Write the owner's settings with real vLLM as the recipe."""
    pair.write_settings(SPARKSERVE_RECIPE=f"{HOME}/recipes/{RECIPE}")


def wheelhouse(cache: Path) -> Path:
    """Give the folder of all wheels, fetched by the machine's own pip where it is not what the list says."""
    folder = cache / "vllm-wheels"
    listed = folder / WHEELS.name
    if not (listed.is_file() and listed.read_bytes() == WHEELS.read_bytes()):
        shutil.rmtree(folder, ignore_errors=True)
        fresh = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        _download(fresh)
        # The kernels are linked with it, and the base image has not got it.
        command("apt-get", "download", "--quiet=2", "libnuma1", directory=fresh)
        shutil.copy(WHEELS, fresh)
        fresh.rename(folder)
    return folder


def _download(folder: Path) -> None:
    torch = next(line for line in WHEELS.read_text().split() if line.startswith("torch=="))
    if (done := _pip(torch, folder)).returncode != 0:
        # An index's default build of torch is for CUDA and several GB: it must not be taken instead.
        advice = "give pip a place that has it (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL, or pip's configuration)"
        raise LabError(f"pip finds no wheel {torch}, the build for processors: {advice}\n{done.stderr}")
    if (done := _pip(f"--requirement={WHEELS}", folder)).returncode != 0:
        raise LabError(f"pip cannot fetch the wheels of {WHEELS}:\n{done.stderr}")


def _pip(wanted: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Fetch wheels for the Python of the lab's base image, which is the machine's own."""
    version = command("/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    options = ["--quiet", "--no-deps", "--only-binary=:all:", f"--python-version={version}", f"--dest={folder}"]
    argv = [sys.executable, "-m", "pip", "download", *options, wanted]
    return subprocess.run(argv, check=False, capture_output=True, text=True)
