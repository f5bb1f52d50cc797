from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sparkserve.errors import EXIT_USAGE, SparkserveError, flatten
from sparkserve.placeholders import render
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe, shipped_names
from tests.unit.cases import CASES, read_rows, row_name

MINIMAL = CASES / "recipe" / "minimal"


def make_recipe(directory: Path, toml: str, extends: str = str(MINIMAL)) -> Path:
    directory.mkdir(parents=True)
    (directory / "recipe.toml").write_text(f"extends = {extends!r}\n{toml}" if extends else toml, encoding="utf-8")
    return directory


def failures(name: str) -> list[SparkserveError]:
    with pytest.raises(SparkserveError) as caught:
        load_recipe(name)
    assert caught.value.exit_code == EXIT_USAGE
    return flatten(caught.value)


def test_the_minimal_recipe_loads() -> None:
    recipe = load_recipe(str(MINIMAL))
    assert (recipe.name, recipe.parameters.context, recipe.directories) == ("minimal", 4096, (MINIMAL,))


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_recipes_load_and_their_files_are_there(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    template = recipe.chat_template
    for file in filter(None, (recipe.image.dockerfile, template.prologue if template else "")):
        assert recipe.file(file)


def test_there_are_shipped_recipes() -> None:
    assert "tensorfold-1017" in shipped_names()


@pytest.mark.parametrize("case", read_rows("recipe", "errors"), ids=row_name)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, case: dict[str, Any]) -> None:
    directory = make_recipe(tmp_path / "r", case["toml"])
    found = failures(str(directory))
    assert sorted(error.message.replace(str(directory), "X") for error in found) == case["errors"]
    assert {error.code for error in found} == {"recipe_invalid"}


@pytest.mark.parametrize("toml", ["schema = ", "a = 1\na = 2\n", "[a]\n[a]\n", "a = 'x"])
def test_toml_that_is_broken(tmp_path: Path, toml: str) -> None:
    (error,) = failures(str(make_recipe(tmp_path / "r", toml)))
    assert error.code == "recipe_invalid"
    assert error.message.startswith(f"{tmp_path}/r/recipe.toml: ")
    assert "line" in error.message or "end of document" in error.message


def test_toml_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes(b'name = "\xff"')
    assert failures(str(tmp_path))[0].code == "recipe_invalid"


@pytest.mark.parametrize(("name", "near"), [("tensorfold-1016", "; did you mean tensorfold-1017?"), ("zzz", "")])
def test_a_recipe_that_is_not_there(name: str, near: str) -> None:
    (error,) = failures(name)
    assert (error.code, error.message) == ("recipe_unknown", f"no recipe {name}{near}")


def test_a_path_that_is_no_recipe(tmp_path: Path) -> None:
    assert failures(str(tmp_path))[0].code == "recipe_unknown"


# -- extends ----------------------------------------------------------------------------------------------------------


def test_tables_merge_and_everything_else_is_replaced(tmp_path: Path) -> None:
    toml = 'name = "child"\n[parameters]\ncontext = 8192\n[launch]\nargv = ["other"]\nenv = { B = "1" }\n'
    recipe = load_recipe(str(make_recipe(tmp_path / "child", toml)))
    assert (recipe.name, recipe.engine, recipe.parameters.context, recipe.parameters.requests) == (
        "child",
        "tensorfold",
        8192,
        2,
    )
    assert recipe.launch.argv == ("other",)
    assert recipe.launch.env == {"NCCL_IB_GID_INDEX": "${link.gid_index}", "B": "1"}
    assert recipe.directories == (tmp_path / "child", MINIMAL)


def test_a_recipe_beside_is_found_by_name_and_grandparents_count(tmp_path: Path) -> None:
    make_recipe(tmp_path / "old", 'name = "old"\ntitle = "old"\nlicence = "MIT"\n')
    make_recipe(tmp_path / "mid", 'name = "mid"\ntitle = "mid"\n', extends="old")
    recipe = load_recipe(str(make_recipe(tmp_path / "new", 'name = "new"\n', extends="mid")))
    assert (recipe.name, recipe.title, recipe.licence) == ("new", "mid", "MIT")
    assert [path.name for path in recipe.directories] == ["new", "mid", "old", "minimal"]


def test_a_shipped_recipe_can_be_extended_by_name(tmp_path: Path) -> None:
    recipe = load_recipe(str(make_recipe(tmp_path / "mine", 'name = "mine"\n', extends="tensorfold-1017")))
    assert (recipe.name, recipe.engine) == ("mine", "tensorfold")
    assert recipe.file(recipe.image.dockerfile)


@pytest.mark.parametrize("names", [("a",), ("a", "b"), ("a", "b", "c")])
def test_recipes_that_extend_each_other(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name, parent in zip(names, (*names[1:], names[0]), strict=True):
        make_recipe(tmp_path / name, f'name = "{name}"\n', extends=parent)
    (error,) = failures(str(tmp_path / "a"))
    assert error.message == f"recipe {tmp_path}/a extends itself"


def test_a_parent_that_is_not_there(tmp_path: Path) -> None:
    (error,) = failures(str(make_recipe(tmp_path / "r", "", extends="nowhere")))
    assert error.message == "no recipe nowhere"


def test_a_parent_that_is_no_name(tmp_path: Path) -> None:
    (error,) = failures(str(make_recipe(tmp_path / "r", "extends = 5\n", extends="")))
    assert error.message == f"{tmp_path}/r/recipe.toml: `extends` should be the name or path of a recipe"


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def family(tmp_path: Path) -> Recipe:
    make_recipe(tmp_path / "parent", 'name = "parent"\n')
    make_recipe(tmp_path / "child", 'name = "child"\n', extends="parent")
    (tmp_path / "parent" / "Dockerfile").write_text("of the parent")
    (tmp_path / "parent" / "only").write_text("of the parent")
    (tmp_path / "child" / "Dockerfile").write_text("of the child")
    (tmp_path / "outside").write_text("secret")
    (tmp_path / "child" / "link").symlink_to(tmp_path / "outside")
    return load_recipe(str(tmp_path / "child"))


def test_the_own_file_comes_before_that_of_the_parent(family: Recipe) -> None:
    assert (family.file("Dockerfile"), family.file("only")) == (b"of the child", b"of the parent")


@pytest.mark.parametrize("name", ["../outside", "link", "/etc/passwd", "../child/../outside", ".", "", "none"])
def test_no_file_outside_is_read(family: Recipe, name: str) -> None:
    with pytest.raises(SparkserveError) as caught:
        family.file(name)
    assert caught.value.code == "recipe_file"


def test_a_recipe_directory_that_is_reached_by_a_link_works(family: Recipe, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "parent", tmp_path / "real" / "parent")
    (tmp_path / "linked").symlink_to(tmp_path / "real" / "parent")
    assert load_recipe(str(tmp_path / "linked")).file("only") == b"of the parent"


# -- placeholders -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rendered"),
    [
        ("--rank=${rank}", "--rank=1"),
        ("${rank}${rank}", "11"),
        ("${link.interface}", "<link.interface>"),
        ("$rank {rank} $${rank}", "$rank {rank} $1"),
        ("a${unknown name}b", "a<unknown name>b"),
        ("${context}", "${rank}"),  # what was put in is not looked at again
        ("plain", "plain"),
    ],
)
def test_render(text: str, rendered: str) -> None:
    assert render(text, {"rank": "1", "context": "${rank}"}) == rendered
