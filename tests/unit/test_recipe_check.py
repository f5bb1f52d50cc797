"""`recipes check`, `new`, `show`, and everything that is refused before anything starts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sparkserve import cli, sources
from sparkserve.blueprint import draw
from sparkserve.errors import SparkserveError, flatten
from sparkserve.recipe_check import check_recipe
from sparkserve.recipe_source import load_recipe, shipped_names, write_skeleton
from sparkserve.settings import Settings
from tests.unit.test_recipe import make_recipe

MIA = "vllm-mia-exl3"


def problems(directory: Path, settings: Settings | None = None) -> dict[str, str]:
    findings, _ = check_recipe(load_recipe(str(directory)), settings or Settings())
    return {item.what: item.problem for item in findings if item.problem}


def change(tmp_path: Path, toml: str, parent: str = MIA) -> Path:
    return make_recipe(tmp_path / "r", f'name = "r"\n{toml}', extends=parent)


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_recipe_passes(name: str) -> None:
    findings, drawn = check_recipe(load_recipe(name), Settings())
    assert not [item for item in findings if item.problem]
    assert drawn is not None
    assert [len(spec.unresolved) > 0 for spec in drawn.specs.values()] == [True, True]


@pytest.mark.parametrize(
    ("toml", "what", "words"),
    [
        ("[ports]\nmaster = 8888\n", "ports", "share port 8888"),
        ('[image]\nreference = ""\ndockerfile = "None"\nbase = "a:1"\n', "files", "no file None"),
        ('[[derived]]\nname = "d"\nmount = "/d"\nfile = "none"\n', "files", "no file none"),
        ('[container]\nmounts = [{ source = "${cache}/a", target = "/model/" }]\n', "mounts", "mounted twice: /model"),
        (
            '[container]\nmounts = [{ source = "${cache}/a", target = "/a" }, { source = "/b", target = "/a" }]\n',
            "mounts",
            "/a",
        ),
        ("[memory]\nrequired_gib = 103\n", "memory", "more than `memory.required_gib`"),
        (
            '[launch]\nmore_argv = ["--block-size", "64", "--block_size=32"]\n',
            "flags of sparkserve-rank1",
            "--block-size",
        ),
        ('[launch]\nhead_argv = ["--node-rank", "0"]\n', "flags of sparkserve-rank0", "--node-rank"),
        ("[launch]\nmore_argv = ['--hf-overrides', '{\"a\":}']\n", "commands of both ranks", "is no JSON"),
        ("[parameters]\ncontext = 700000\n", "commands of both ranks", "at most 614,400 tokens"),
        ("[memory]\nkv_bytes = 1_000_000_000\n", "commands of both ranks", "at most 288,433 tokens"),
    ],
)
def test_what_collides_is_named(tmp_path: Path, toml: str, what: str, words: str) -> None:
    found = problems(change(tmp_path, toml))
    assert what in found
    assert {*found} - {what} <= {"commands of both ranks", "flags of sparkserve-rank0"}, "nothing else is wrong"
    assert words in found[what]


def test_the_skeleton_passes_its_check_and_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "my-recipe"
    assert cli._run(["recipes", "new", str(directory)]) == 0
    assert tomllib.loads((directory / "recipe.toml").read_text())["name"] == "my-recipe"
    assert cli._run(["recipes", "check", str(directory)]) == 0
    assert "docker" in capsys.readouterr().out
    with pytest.raises(SparkserveError, match="is there already"):
        write_skeleton(directory)
    with pytest.raises(SparkserveError, match="cannot be the name"):
        write_skeleton(tmp_path / "My Recipe")


def test_check_fails_with_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = change(tmp_path, "[ports]\nmaster = 8888\n")
    assert cli._run(["recipes", "check", str(directory), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["exit_code"]) == ("failed", 1)
    assert [row["what"] for row in found["data"]["findings"] if row["problem"]] == ["ports", "commands of both ranks"]


def test_a_recipe_that_is_there_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.toml").write_text("mine")
    assert cli._run(["recipes", "new", str(tmp_path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["code"] == "recipe_exists"
    assert (tmp_path / "recipe.toml").read_text() == "mine"


def test_list_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in shipped_names())
    assert cli._run(["recipes", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["data"]["recipes"]) == len(shipped_names())
    assert cli._run(["recipes", "show", "tensorfold-1017-bf16-overrides"]) == 0
    shown = capsys.readouterr().out
    for text in ("not proven on Sparks", "warning: experimental", "uncensored", "108 GiB", "API 8888", "rank1: /opt"):
        assert text in shown
    assert cli._run(["recipes", "show", "tensorfold-1016"]) == 2
    assert "did you mean" in capsys.readouterr().err


# -- refused before anything starts -----------------------------------------------------------------------------------


def refused(settings: dict[str, Any], recipe: str) -> SparkserveError:
    with pytest.raises(SparkserveError) as caught:
        draw(Settings.model_validate(settings), load_recipe(recipe), None, None)
    return flatten(caught.value)[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context": 1_048_576}, "SPARKSERVE_CONTEXT is 1,048,576, the recipe allows at most 614,400 tokens"),
        ({"extra_args": "--max-model-len 9"}, "--max-model-len sets --max-model-len"),
        ({"extra_args": "--spec={}"}, "--spec={} sets --speculative-config"),
        ({"extra_args": "--override-generation-config '{x}'"}, "the argument {x} is no JSON"),
        ({"thinking": True}, "has no such value"),
        ({"api_key_file": "/k"}, "cannot give its engine a key"),
    ],
)
def test_settings_that_the_recipe_cannot_take(settings: dict[str, Any], words: str) -> None:
    assert words in refused(settings, MIA).message


def test_an_unset_image_says_which_key() -> None:
    recipe = load_recipe("vllm-1017")
    with pytest.raises(SparkserveError) as caught:
        sources._find_reference(recipe.image, Settings())
    assert caught.value.code == "image_unset"
    assert "set SPARKSERVE_IMAGE in .env" in caught.value.hint
    assert "forum" in caught.value.hint


def test_the_own_lock_of_a_recipe_is_not_taken_for_another_image(tmp_path: Path) -> None:
    from sparkserve.lock import read_lock

    recipe = load_recipe(MIA)
    nowhere = tmp_path / "sparkserve.lock.json"
    own = read_lock(nowhere, recipe, Settings())
    assert own is not None
    assert own.total_bytes == 413_750_560_734
    other = Settings(image="ghcr.io/other/image@sha256:" + "0" * 64)
    assert read_lock(nowhere, recipe, other) is None
