"""What the tests of the engine image share; the scripted `docker` is first on PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkserve.cluster import Deployment
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from tests.component.fake_docker import FakeDocker
from tests.component.image.stage import RECIPE, lock_of, make_deployment
from tests.lab.git_area import publish_commit


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    directory = tmp_path / "little"
    directory.mkdir()
    (directory / "recipe.toml").write_text(RECIPE)
    (directory / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\nCOPY engine /opt/engine\n")
    (directory / "patches").mkdir()
    (directory / "patches/one.diff").write_text("a patch")
    return load_recipe(str(directory))


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    fake = FakeDocker(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{fake.install()}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return fake


@pytest.fixture
def engine(tmp_path: Path) -> tuple[str, str]:
    commit = publish_commit(tmp_path / "git", "engine", {"run": "#!/bin/sh\n", "src/deep.txt": "deep"})
    return str(tmp_path / "git/_git/engine.git"), commit


@pytest.fixture
def deployment(recipe: Recipe, docker: FakeDocker, engine: tuple[str, str], tmp_path: Path) -> Deployment:
    return make_deployment(recipe, docker, tmp_path, lock_of(recipe, *engine))
