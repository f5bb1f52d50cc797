"""Secrets that a recipe only names, and directories of the owner's that it uses in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkserve.container import ContainerSpec, build_spec, with_secrets
from sparkserve.docker_form import create_arguments, docker_run_argv
from sparkserve.errors import EXIT_USAGE, Failures, SparkserveError
from sparkserve.parameters import check_exposure, read_secrets
from sparkserve.recipe import Mount, Recipe
from sparkserve.recipe_check import check_recipe
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from tests.unit.deployments import FILES, IMAGE, LINKS, make_deployment

OWNERS = Mount(source="/srv/model", target="/own", writable=False, must_exist=True)


def recipe_with(launch: dict[str, Any] | None = None, container: dict[str, Any] | None = None) -> Recipe:
    recipe = load_recipe("tensorfold-1017")
    parts = {"launch": launch or {}, "container": container or {}}
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update=update) for name, update in parts.items()}
    )


def build(rank: int, recipe: Recipe, **changes: Any) -> ContainerSpec:
    return build_spec(make_deployment(changes, recipe=recipe), rank, LINKS, FILES, IMAGE)


@pytest.fixture
def secrets_file(tmp_path: Path) -> Path:
    path = tmp_path / "secrets"
    path.touch(mode=0o600)
    path.write_text("HF_TOKEN=hf_of-the-owner\nOTHER='two words'\n")
    return path


def test_a_secret_is_in_the_container_and_in_nothing_that_is_shown(secrets_file: Path) -> None:
    recipe = recipe_with(
        {"env": {"HF_TOKEN": "${secret.HF_TOKEN}"}, "argv": ("serve", "--x=${secret.OTHER}${dollar}{HOME}")}
    )
    spec = build(0, recipe)
    assert spec.unresolved == ()
    assert "--env=HF_TOKEN=<secret.HF_TOKEN>" in docker_run_argv(spec)
    filled = with_secrets(spec, read_secrets(Settings(secrets_file=secrets_file)))
    assert filled.env == {"HF_TOKEN": "hf_of-the-owner"}
    assert filled.argv[:2] == ("serve", "--x=two words${HOME}")
    assert filled.digest == spec.digest


def test_a_secret_that_nobody_knows_is_named() -> None:
    spec = build(0, recipe_with({"env": {"A": "${secret.NO_SUCH}"}}))
    with pytest.raises(SparkserveError) as caught:
        with_secrets(spec, {})
    assert (caught.value.code, caught.value.exit_code) == ("secret_unset", EXIT_USAGE)
    assert "NO_SUCH" in caught.value.message


def test_a_secrets_file_is_private_and_strict(secrets_file: Path) -> None:
    secrets_file.write_text("no line of ours\n")
    with pytest.raises(Failures, match="NAME=value"):
        read_secrets(Settings(secrets_file=secrets_file))
    secrets_file.chmod(0o644)
    with pytest.raises(SparkserveError, match="can be read by others"):
        read_secrets(Settings(secrets_file=secrets_file))


def test_the_key_of_the_api_can_be_an_argument(secrets_file: Path) -> None:
    secrets_file.write_text("the-key\n")
    settings = Settings(api_key_file=secrets_file)
    recipe = recipe_with({"api_key_mount": "", "head_argv": ("--api-key", "${secret.api_key}")})
    check_exposure(settings, recipe)
    spec = build(0, recipe, api_key_file=secrets_file)
    assert with_secrets(spec, read_secrets(settings)).argv.count("the-key") == 1
    assert not [mount for mount in spec.mounts if mount.source == str(secrets_file)]
    with pytest.raises(SparkserveError, match="cannot give its engine a key"):
        check_exposure(settings, recipe_with({"api_key_mount": "", "switches": ()}))


def test_a_mount_of_one_rank() -> None:
    own = tuple(OWNERS.model_copy(update={"source": f"/srv/{rank}", "ranks": (rank,)}) for rank in (0, 1))
    recipe = recipe_with(container={"mounts": own})
    for rank in (0, 1):
        assert [mount.source for mount in build(rank, recipe).mounts if mount.owners] == [f"/srv/{rank}"]
    findings = {item.what: item.problem for item in check_recipe(recipe)[0]}
    assert findings["mounts"] == ""
    doubled = recipe_with(container={"mounts": (OWNERS, *own)})
    findings = {item.what: item.problem for item in check_recipe(doubled)[0]}
    assert findings["mounts"] == "mounted twice: /own"


def test_user_and_directory_reach_docker_in_both_forms() -> None:
    spec = build(1, recipe_with(container={"user": "1000:1000", "directory": "/work"}))
    assert {"--user=1000:1000", "--workdir=/work"} <= set(docker_run_argv(spec))
    assert {create_arguments(spec)[0][name] for name in ("user", "working_dir")} == {"1000:1000", "/work"}
    assert not [word for word in docker_run_argv(build(1, recipe_with())) if word.startswith(("--user", "--workdir"))]
