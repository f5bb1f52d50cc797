"""Which recipes' locks count when it is decided what can go."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkserve import image_facts, records, storage
from sparkserve.cluster import Deployment
from sparkserve.container import image_id
from sparkserve.errors import SparkserveError
from sparkserve.lifecycle import Session, find_recipe
from sparkserve.lock import write_lock
from sparkserve.recipe import Recipe
from tests.fakes import make_cluster
from tests.unit.deployments import make_lock
from tests.unit.test_operations import make_session

OWN = 'schema = 1\nextends = "tensorfold-1017"\nname = "own"\n'


def deployment_of(session: Session) -> Deployment:
    return Deployment(session.settings, session.recipe, make_lock(session.recipe), make_cluster())


def own_recipe(tmp_path: Path) -> Recipe:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / "recipe.toml").write_text(OWN)
    return find_recipe(str(directory), {})


def test_what_the_lock_of_another_recipe_needs_must_stay(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    write_lock(session.lock_file, make_lock(session.recipe))
    other = find_recipe("tensorfold-1017-lowmem", {})
    lock = make_lock(other)
    write_lock(tmp_path / "sparkserve.tensorfold-1017-lowmem.lock.json", lock)
    deployment = deployment_of(session)
    deployments = storage._with_others(session, deployment)
    assert [one.recipe.name for one in deployments] == [session.recipe.name, "tensorfold-1017-lowmem"]
    node = deployment.cluster.head
    node.identity = {"home": "/home/spark", "uid": 1000}
    wanted = storage._wanted(deployments, node)
    tag = image_facts.tag_of(other, lock)
    assert wanted.locks[1] == lock
    assert tag in wanted.images
    assert any(path.endswith(f"/{image_id(tag)}") for path in wanted.folders)
    (tmp_path / "sparkserve.tensorfold-1017-lowmem.lock.json").unlink()
    assert storage._with_others(session, deployment) == [deployment]
    assert tag not in storage._wanted([deployment], node).images


def test_the_settings_recipe_counts_while_another_is_named(tmp_path: Path) -> None:
    main = make_session(tmp_path)
    write_lock(main.lock_file, make_lock(main.recipe))
    session = make_session(tmp_path, "tensorfold-1017-lowmem")
    assert session.lock_file.name == "sparkserve.tensorfold-1017-lowmem.lock.json"
    deployments = storage._with_others(session, deployment_of(session))
    assert [one.recipe.name for one in deployments] == ["tensorfold-1017-lowmem", main.recipe.name]


def test_a_recipe_outside_of_ours_is_found_by_how_it_was_started(tmp_path: Path) -> None:
    session = make_session(tmp_path)
    recipe = own_recipe(tmp_path)
    write_lock(tmp_path / "sparkserve.own.lock.json", make_lock(recipe))
    with pytest.raises(SparkserveError) as caught:
        storage._with_others(session, deployment_of(session))
    assert (caught.value.code, "recipe own" in caught.value.message) == ("prune_recipe", True)
    record = records.Record("run-1", "start", str(tmp_path / "mine"), 0.0, {}, {})
    records.save_record(session.state / "runs", record)
    assert storage._with_others(session, deployment_of(session))[1].recipe.name == "own"
