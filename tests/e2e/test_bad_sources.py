"""Sources that cannot be had: each is told by name with the key to set; no lock is written, nor anything else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.refusal import codes, refused
from tests.lab.model_repo import MODEL_NAME, TEMPLATE_NAME
from tests.lab.pair import HOME, Pair

pytestmark = pytest.mark.lab
RECIPE = f"{HOME}/recipes/lab/recipe.toml"


@pytest.fixture(autouse=True)
def recipe_as_it_was(pair: Pair) -> Iterator[None]:
    text = pair.head.run(["cat", RECIPE]).stdout
    yield
    pair.write(RECIPE, text)


def change_recipe(pair: Pair, old: str, new: str) -> None:
    text = pair.head.run(["cat", RECIPE]).stdout.decode()
    assert old in text
    pair.write(RECIPE, text.replace(old, new))


@pytest.mark.parametrize("revision", ["f" * 40, "nobranch"])
def test_a_wrong_revision_of_the_weights(unlocked: Pair, revision: str) -> None:
    change_recipe(unlocked, unlocked.commits[MODEL_NAME], revision)
    code, errors = refused(unlocked, "up")
    assert (code, len(errors)) == (1, 1)
    assert revision in errors[0]["message"]
    assert "`revision` in the recipe" in errors[0]["hint"]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"HF_ENDPOINT": "http://hub.lab:1"}, "HF_ENDPOINT"),
        ({"HF_TOKEN": "hf_wrong_token"}, "HF_TOKEN"),
        ({"HF_TOKEN": None}, "HF_TOKEN"),
    ],
)
def test_a_hub_that_gives_nothing(unlocked: Pair, changes: dict[str, str | None], key: str) -> None:
    unlocked.write_settings(**changes)
    code, errors = refused(unlocked, "up")
    assert code == 1
    assert len(errors) == 3  # two weights and the template, each by name
    assert all(key in error["hint"] for error in errors)
    assert MODEL_NAME in errors[0]["message"]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("SPARKSERVE_ENGINE_REPOSITORY", "{hub}/smart-git/gone.git", "source_unreachable"),
        ("SPARKSERVE_ENGINE_REVISION", "nobranch", "engine_revision"),
        ("SPARKSERVE_ENGINE_REVISION", "a" * 40, "engine_revision"),
    ],
)
def test_an_engine_that_is_not_there(unlocked: Pair, name: str, value: str, code: str) -> None:
    unlocked.write_settings(**{name: value.format(hub=unlocked.hub.endpoint)})
    exit_code, errors = refused(unlocked, "up")
    assert (exit_code, codes(errors)) == (1, [(code, "")])
    assert name in errors[0]["hint"]


@pytest.mark.parametrize(("old", "new"), [("python-base:12", "python-base:99"), ("lab/python-base", "lab/nosuch")])
def test_a_base_image_that_is_not_there(unlocked: Pair, old: str, new: str) -> None:
    change_recipe(unlocked, old, new)
    code, errors = refused(unlocked, "up")
    assert (code, len(errors)) == (1, 1)
    assert "the image in the recipe" in errors[0]["hint"]


def test_a_hub_that_lacks_a_repository(unlocked: Pair) -> None:
    change_recipe(unlocked, TEMPLATE_NAME, "lab/no-such-template")
    code, errors = refused(unlocked, "up")
    assert (code, len(errors)) == (1, 1)
    assert "lab/no-such-template" in errors[0]["message"]
    assert "HF_ENDPOINT" in errors[0]["hint"]
