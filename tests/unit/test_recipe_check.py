"""`recipes check`, `new`, `show`, and everything that is refused before anything starts."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import SecretStr

from sparkserve import cli, image_facts, lifecycle, planning, sources
from sparkserve.blueprint import draw
from sparkserve.cluster import Deployment
from sparkserve.container import with_secrets
from sparkserve.errors import SparkserveError, flatten
from sparkserve.recipe_check import check_recipe
from sparkserve.recipe_source import load_recipe, shipped_names, write_skeleton
from sparkserve.settings import Settings
from tests.unit.cases import CASES
from tests.unit.test_recipe import make_recipe
from tests.unit.test_recipe_golden import SEEN

MIA = "vllm-mia-exl3"


def problems(directory: Path) -> dict[str, str]:
    findings, _ = check_recipe(load_recipe(str(directory)))
    return {item.what: item.problem for item in findings if item.problem}


def change(tmp_path: Path, toml: str, parent: str = MIA) -> Path:
    return make_recipe(tmp_path / "r", f'name = "r"\n{toml}', extends=parent)


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_recipe_passes(name: str) -> None:
    recipe = load_recipe(name)
    findings, drawn = check_recipe(recipe)
    assert not [item for item in findings if item.problem]
    assert drawn is not None
    assert [len(spec.unresolved) > 0 for spec in drawn.specs.values()] == [True, True]
    assert recipe.image.flags_help, "a flag that the engine does not know is refused before anything starts"


@pytest.mark.parametrize("name", ["two-programs", "patched-image", "shell-script"])
def test_forms_of_other_launchers_pass(name: str) -> None:
    assert problems(CASES / "recipe" / name) == {}


def test_two_programs_get_their_own_commands_and_no_arguments_of_each_other() -> None:
    recipe = load_recipe(str(CASES / "recipe" / "two-programs"))
    settings = Settings.model_validate({"extra_args": "--no-webui -ctk q8_0"})
    head, worker = draw(settings, recipe, None, SEEN).specs.values()
    assert (head.entrypoint, worker.entrypoint) == (("/app/llama-server",), ("/app/rpc-server",))
    assert head.argv[-3:] == ("--no-webui", "-ctk", "q8_0")
    assert worker.argv == ("-H", SEEN.nodes["worker"].address, "-p", "50052")
    assert head.env["ONE_DEVICE"] == "rocep1s0f1"
    assert image_facts.long_flags(recipe, settings.extra_args) == {
        ("/app/llama-server",): ("--alias", "--host", "--port", "--rpc", "--parallel", "--metrics", "--no-webui"),
        ("/app/rpc-server",): (),
    }


@pytest.mark.parametrize("extra", ["-c9", "--ctx-size 9", "-np 2", "--par=2", "--model x", "-m/other.gguf"])
def test_no_spelling_of_an_owned_flag_is_taken(extra: str) -> None:
    with pytest.raises(SparkserveError) as caught:
        draw(
            Settings.model_validate({"extra_args": extra}),
            load_recipe(str(CASES / "recipe" / "two-programs")),
            None,
            None,
        )
    assert caught.value.code == "extra_args_owned"


def test_a_script_takes_no_extra_arguments() -> None:
    recipe = load_recipe(str(CASES / "recipe" / "shell-script"))
    with pytest.raises(SparkserveError) as caught:
        draw(Settings.model_validate({"extra_args": "--enforce-eager"}), recipe, None, None)
    assert caught.value.code == "extra_args_shell"
    assert "--enforce-eager would be an argument of recipe shell-script's shell" in caught.value.message


def test_a_key_of_vllm_is_in_the_environment_of_rank_0_and_only_where_there_is_one() -> None:
    recipe = load_recipe(MIA)
    for settings, expected in ((Settings(), [False, False]), (Settings(api_key_file=Path("/k")), [True, False])):
        drawn = draw(settings, recipe, None, None)
        assert ["VLLM_API_KEY" in spec.env for spec in drawn.specs.values()] == expected
        assert not [word for spec in drawn.specs.values() for word in spec.argv if "key" in word and "kv" not in word]
    filled = with_secrets(drawn.specs["head"], {"api_key": SecretStr("sk-1")})
    assert filled.env["VLLM_API_KEY"] == "sk-1"


@pytest.mark.parametrize(
    ("toml", "what", "words"),
    [
        ("[ports]\nmaster = 8888\n", "ports", "api and master cannot both be 8888"),
        ("[ports]\nmore = { rpc = 8888 }\n[launch]\nenv = { A = '${ports.rpc}' }\n", "ports", "api and rpc"),
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
        (
            '[launch]\nhead_argv = ["--host", "${api_host}", "--port", "${ports.api}", "--node-rank", "0"]\n',
            "flags of sparkserve-rank0",
            "--node-rank",
        ),
        ("[launch]\nmore_argv = ['--hf-overrides', '{\"a\":}']\n", "commands of both ranks", "is no JSON"),
        ("[launch]\nmore_argv = ['--hf-overrides={bad']\n", "commands of both ranks", "--hf-overrides={bad is no JSON"),
        (
            "[parameters]\ncontext = 700000\n",
            "commands of both ranks",
            "parameters.context is 700,000, the recipe allows at most 614,400 tokens",
        ),
        ("[parameters]\nthinking = true\n", "parameters", "thinking"),
        (
            '[launch]\nargv = ["serve", "/model"]\nhead_argv = []\n',
            "parameters",
            "${model_name}, ${context}, ${requests}, ${api_host}, ${ports.api}, ${ports.master}",
        ),
        ('[launch]\nargv = ["serve", "/model"]\nworker_argv = []\nhead_argv = []\n', "parameters", "${rank}"),
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
    shown = capsys.readouterr().out
    assert "docker" in shown
    assert "# recipe my-recipe; places in <> are looked up on the nodes; no lock yet" in shown
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
    for text in ("not proven on Sparks", "warning: experimental", "uncensored", "110.3 GiB", "api 8888", "rank1: /opt"):
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
        ({"extra_args": "--speculative-config={}"}, "--speculative-config={} sets --speculative-config"),
        ({"extra_args": "--speculative-config.num_speculative_tokens=5"}, "sets --speculative-config"),
        ({"extra_args": "--hf-overrides.engram_table_dir=/x"}, "sets --hf-overrides"),
        ({"extra_args": "--hf_overrides.a.b 1"}, "sets --hf-overrides"),
        ({"extra_args": "-sc={}"}, "-sc={} sets -sc"),
        ({"extra_args": "-sc.method=x"}, "-sc.method=x sets -sc"),
        ({"extra_args": "-q fp8"}, "-q sets -q"),
        ({"extra_args": "--spec-method mtp"}, "--spec-method sets --spec-method"),
        ({"extra_args": "--spec-model x"}, "--spec-model sets --spec-model"),
        ({"extra_args": "--spec-tokens 9"}, "--spec-tokens sets --spec-tokens"),
        ({"extra_args": "--no-enable-prefix-caching"}, "sets --enable-prefix-caching"),
        ({"extra_args": "--no-enable-pref"}, "sets --enable-prefix-caching"),
        ({"extra_args": "--enable-flashinfer-autotune"}, "sets --no-enable-flashinfer-autotune"),
        ({"extra_args": "--no-headless"}, "sets --headless"),
        ({"extra_args": "--spec={}"}, "--spec={} sets --spec"),
        ({"extra_args": "--override-generation-config '{x}'"}, "the argument {x} is no JSON"),
        ({"extra_args": "--override-generation-config={x"}, "--override-generation-config={x is no JSON"),
        ({"extra_args": "-tp 1"}, "-tp sets -tp"),
        ({"extra_args": "-tp=1"}, "-tp=1 sets -tp"),
        ({"extra_args": "-n1"}, "-n1 sets -n"),
        ({"extra_args": "--model other"}, "--model sets --model"),
        ({"extra_args": "--api-key k"}, "--api-key sets --api-key"),
        ({"thinking": True}, "has no such value"),
    ],
)
def test_settings_that_the_recipe_cannot_take(settings: dict[str, Any], words: str) -> None:
    assert words in refused(settings, MIA).message


@pytest.mark.parametrize("extra", ["--tp 4", "--tp-size 4", "--tensor-parallel-size=4"])
def test_sglang_is_not_given_another_size(extra: str) -> None:
    assert refused({"extra_args": extra}, "sglang-qwen2.5-72b").code == "extra_args_owned"


def test_a_key_is_refused_where_the_engine_takes_it_in_sight_only() -> None:
    assert "cannot give its engine a key" in refused({"api_key_file": "/k"}, "sglang-qwen2.5-72b").message


@pytest.mark.parametrize(
    ("text", "image_table", "words"),
    [
        ("FROM python:3\n", "", "no `FROM ${BASE}`"),
        ("# FROM ${BASE}\nFROM python:3\n", "", "no `FROM ${BASE}`"),
        ("ARG BASE\nFROM $BASE\nCOPY engine /opt/engine\n", "", "which only an `engine_repository` puts there"),
        (
            "ARG BASE\nFROM $BASE\nRUN true\n",
            'engine_repository = "g"\nengine_revision = "main"',
            "nothing of `engine/`",
        ),
        ("ARG BASE\nFROM --platform=linux/arm64 ${BASE} AS one\nCOPY engine.patch /\n", "", ""),
        ("ARG BASE\nFROM ${BASE}\nCOPY . /src\n", 'engine_repository = "g"\nengine_revision = "main"', ""),
    ],
)
def test_a_dockerfile_uses_what_is_pinned_for_it(tmp_path: Path, text: str, image_table: str, words: str) -> None:
    toml = f'[image]\nreference = ""\ndockerfile = "Dockerfile"\nbase = "a:1"\n{image_table}\n'
    directory = change(tmp_path, toml)
    (directory / "Dockerfile").write_text(text)
    (directory / "engine.patch").touch()
    found = problems(directory)
    assert words in found.pop("Dockerfile", "")
    assert found == {}


def test_known_warnings_are_told_before_a_start_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("tensorfold-1017-bf16-overrides")
    told: list[str] = []

    def plan_start(*_: object, **_how: object) -> None:
        assert told == [*recipe.warnings]
        raise Interrupted

    monkeypatch.setattr(planning, "plan_preparation", lambda _: [])
    monkeypatch.setattr(planning, "plan_start", plan_start)
    session = SimpleNamespace(recipe=recipe, voice=SimpleNamespace(warn=told.append), state=Path("/"), skip_checks=())
    with pytest.raises(Interrupted):
        lifecycle.plan_steps(cast("lifecycle.Session", session), cast("Deployment", None), ("start",))
    assert told


class Interrupted(Exception):
    """The start was reached."""


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
