"""The wheel, as a Spark owner gets it: installed in a venv of its own, run from another directory."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from sparkserve import __version__

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without network by the pinned build backend."""
    folder = tmp_path_factory.mktemp("wheel")
    argv = [*PIP, "wheel", str(ROOT), "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run(argv, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installation(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh venv with only the wheel in it; its dependencies are borrowed from the venv that runs the tests."""
    folder = tmp_path_factory.mktemp("installation")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    argv = [*PIP, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(argv, check=True, capture_output=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Python does not read .pth files of a directory that a .pth file names: the checkout itself stays out of reach.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def run(installation: Path, *words: str, folder: Path) -> str:
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"}
    argv = [str(installation / "bin" / words[0]), *words[1:]]
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_carries_the_templates_and_the_licence_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    shipped = {f"sparkserve/{path.relative_to(ROOT)}" for path in (ROOT / "templates").rglob("*") if path.is_file()}
    modules = {f"sparkserve/{path.relative_to(ROOT / 'sparkserve')}" for path in (ROOT / "sparkserve").rglob("*.py")}
    information = {name for name in names if name.startswith(f"sparkserve-{__version__}.dist-info/")}
    assert names - information == shipped | modules | {"sparkserve/templates/env.example"}
    assert any(name.endswith("/LICENSE") for name in information)


def test_the_wheel_is_for_every_machine(wheel: Path) -> None:
    assert wheel.name == f"sparkserve-{__version__}-py3-none-any.whl"


def test_the_module_is_the_installed_one(installation: Path, tmp_path: Path) -> None:
    place = run(installation, "python", "-c", "import sparkserve; print(sparkserve.__file__)", folder=tmp_path)
    assert Path(place.strip()).is_relative_to(installation)


def test_version_and_help(installation: Path, tmp_path: Path) -> None:
    assert run(installation, "sparkserve", "--version", folder=tmp_path) == f"sparkserve {__version__}\n"
    assert "Start here: sparkserve init" in run(installation, "sparkserve", "--help", folder=tmp_path)


def test_the_shipped_recipes_are_found(installation: Path, tmp_path: Path) -> None:
    shipped = {path.parent.name for path in (ROOT / "templates/recipes").glob("[!_]*/recipe.toml")}
    assert "tensorfold-1017" in shipped
    result = json.loads(run(installation, "sparkserve", "recipes", "--json", folder=tmp_path))
    assert {row["name"] for row in result["data"]["recipes"]} == shipped


def test_the_settings_are_shown(installation: Path, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("SPARKSERVE_WORKER=worker.example\n")
    shown = run(installation, "sparkserve", "config", folder=tmp_path)
    assert any("SPARKSERVE_WORKER" in line and "worker.example" in line for line in shown.splitlines())
