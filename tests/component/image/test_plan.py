"""What the name of an engine image depends on, and what is planned for what is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkserve import image, image_facts
from sparkserve.cluster import Deployment
from sparkserve.errors import DOCKER_PROBLEMS, SparkserveError
from sparkserve.image_facts import Facts, ImageFacts
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from tests.component.image.stage import DIGEST, RECIPE, lock_of, tag
from tests.fakes import FakeSession, make_node


def test_the_name_is_what_the_image_is_made_of(recipe: Recipe) -> None:
    directory = recipe.directories[0]
    steps: list[Callable[[], Any]] = [
        lambda: (directory / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\n"),
        lambda: (directory / "patches/one.diff").write_text("another patch"),
        lambda: (directory / "patches/one.diff").chmod(0o755),
        lambda: (directory / "two.txt").write_text("a new file"),
    ]
    seen = [image_facts.tag_of(recipe, lock_of(recipe))]
    for step in steps:
        step()
        seen.append(image_facts.tag_of(recipe, lock_of(recipe)))
    seen.append(image_facts.tag_of(recipe, lock_of(recipe, commit="2" * 40)))
    seen.append(image_facts.tag_of(recipe, lock_of(recipe, base="registry.lab/base@sha256:" + "1" * 64)))
    changed = recipe.model_copy(update={"image": recipe.image.model_copy(update={"build_arguments": {"A": "1"}})})
    seen.append(image_facts.tag_of(changed, lock_of(recipe)))
    assert len(set(seen)) == len(seen)
    assert all(name.startswith("sparkserve/little:") for name in seen)


def test_nothing_else_changes_the_name(recipe: Recipe) -> None:
    directory = recipe.directories[0]
    before = image_facts.tag_of(recipe, lock_of(recipe))
    (directory / "README.md").write_text("text")
    (directory / ".editor").write_text("hidden")
    (directory / "recipe.toml").write_text(RECIPE.replace("little engine", "tiny engine"))
    (directory / "link").symlink_to("/etc/passwd")
    moved = lock_of(recipe, repository="elsewhere", base=f"mirror.lab/base@{DIGEST}")
    assert image_facts.tag_of(recipe, moved) == before
    assert set(image_facts.build_files(recipe)) == {"Dockerfile", "patches/one.diff"}


def test_a_recipe_that_extends_another_replaces_single_build_files(recipe: Recipe, tmp_path: Path) -> None:
    child = tmp_path / "child"
    (child / "patches").mkdir(parents=True)
    (child / "recipe.toml").write_text('extends = "little"\nname = "child"\n')
    (child / "patches/one.diff").write_text("the child's patch")
    files = image_facts.build_files(load_recipe(str(child)))
    assert files["patches/one.diff"].content == b"the child's patch"
    assert files["Dockerfile"] == image_facts.build_files(recipe)["Dockerfile"]


def test_a_finished_image_is_named_by_its_digest(recipe: Recipe) -> None:
    finished = recipe.model_copy(update={"image": recipe.image.model_copy(update={"dockerfile": ""})})
    names = {image_facts.tag_of(finished, lock_of(finished, reference=f"a/b@sha256:{digit * 64}")) for digit in "12"}
    assert len(names) == 2
    assert image_facts.labels_of(finished, lock_of(finished)) == {}


# -- the plan --------------------------------------------------------------------------------------------------------


def facts_of(labels: dict[str, str], layers: tuple[str, ...] = ("1",), architecture: str = "amd64") -> Facts:
    found = ImageFacts(layers, labels, architecture, 1000)
    return Facts(found, 10**12, "/docker", known_flags={PROGRAM: FLAGS})


PROGRAM = ("/opt/engine/run", "now")
FLAGS = frozenset({"--rank", "--thinking", "--no-thinking"})
ABSENT = Facts(None, 10**12, "/docker")


def test_what_is_planned_for_what_is_found(deployment: Deployment) -> None:
    labels = image_facts.labels_of(deployment.recipe, deployment.lock)
    good, other = facts_of(labels), facts_of(labels, ("2",))
    wrong = facts_of({**labels, "sparkserve.context": "another"})
    cases = [
        (ABSENT, ABSENT, ["build", "ship"]),
        (ABSENT, good, ["build", "ship"]),
        (good, ABSENT, ["ship"]),
        (good, other, ["ship"]),
        (good, good, []),
        (wrong, good, ["build", "ship"]),
        (facts_of(labels, architecture="arm64"), good, ["build", "ship"]),
        (facts_of({**labels, "sparkserve.engine.repository": "moved"}), good, []),
        (replace(good, known_flags={("another",): FLAGS}), good, ["flags"]),
        (replace(good, known_flags={PROGRAM: FLAGS - {"--thinking"}}), good, ["flags"]),
        (replace(good, known_flags={PROGRAM: FLAGS | {"--of-another-recipe"}}), good, []),
    ]
    for head, worker, steps in cases:
        changes = image.plan(deployment, {"head": head, "worker": worker})
        assert [change.step for change in changes] == steps, (head, worker)
        assert {change.lane for change in changes} <= {"image"}
        if "ship" in steps:
            assert changes[-1].needs == (f"head/build/{tag(deployment)}", f"head/flags/{tag(deployment)}")


def test_only_what_the_worker_lacks_is_counted(deployment: Deployment) -> None:
    labels = image_facts.labels_of(deployment.recipe, deployment.lock)
    found = ImageFacts(("a", "b", "c"), labels, "amd64", 1000, steps=(600, 0, 300, 100))
    head = Facts(found, 10**12, "/docker", chains=(found.layers,), known_flags={PROGRAM: FLAGS})
    cases: list[tuple[tuple[tuple[str, ...], ...], str, int]] = [
        ((), "absent", 1000),
        ((("b",), ("x", "b", "c")), "absent", 1000),
        ((("a",), ("a", "x", "c")), "1 of 3 layers", 400),
        ((("a",), ("a", "b", "x")), "2 of 3 layers", 100),
        ((("a", "b", "c", "d"),), "3 of 3 layers", 0),
    ]
    for chains, before, size in cases:
        (change,) = image.plan(deployment, {"head": head, "worker": replace(ABSENT, chains=chains)})
        assert (change.before, change.size) == (before, size), chains
    # A layer without a byte cannot be told from a step without a layer: then too much is counted, never too little.
    empty = replace(found, steps=(600, 0, 400))
    assert [empty.size_above(layers) for layers in (0, 1, 2, 3)] == [1000, 1000, 400, 0]


@pytest.mark.parametrize("error", ["missing", "permission", "refused", "timeout"])
def test_no_answer_of_docker_is_not_absence(deployment: Deployment, error: str) -> None:
    broken = FakeSession({"facts": lambda **asked: {"docker": {page: {"error": error} for page in asked["docker"]}}})
    with pytest.raises(SparkserveError, match=DOCKER_PROBLEMS[error][0]) as caught:
        image.gather(make_node("worker", session=broken), deployment)
    assert (caught.value.code, caught.value.node) == ("docker_unreachable", "worker")
