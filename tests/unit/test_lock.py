from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sparkserve.errors import EXIT_USAGE, SparkserveError, flatten
from sparkserve.lock import Lock, find_disagreements, lock_path, read_lock, write_lock
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from tests.unit.cases import CASES, read_case, read_rows, row_name
from tests.unit.test_recipe import make_recipe

MINIMAL = CASES / "lock" / "minimal.lock.json"


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(str(CASES / "recipe" / "minimal"))


def changed(changes: dict[str, Any]) -> Lock:
    data = read_case(MINIMAL)
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = data
        for part in parents:
            place = place[int(part) if part.isdigit() else part]
        place[last] = value
    return Lock.model_validate(data)


def differences(lock: Lock, recipe: Recipe, settings: Settings | None = None) -> list[str]:
    found = find_disagreements(lock, recipe, settings or Settings())
    assert {(error.code, error.exit_code) for error in found} <= {("lock_differs", EXIT_USAGE)}
    return [error.message.removeprefix("the lock does not fit: ") for error in found]


@pytest.mark.parametrize("case", read_rows("lock", "disagreements"), ids=row_name)
def test_a_lock_of_other_sources(recipe: Recipe, case: dict[str, Any]) -> None:
    assert differences(changed(case["lock"]), recipe, Settings(**case["settings"])) == case["differences"]


@pytest.mark.parametrize("case", read_rows("lock", "recipes"), ids=row_name)
def test_a_recipe_that_wants_other_weights(tmp_path: Path, case: dict[str, Any]) -> None:
    toml = f'[[weights]]\nname = "model"\nrepository = "org/tiny"\nmount = "/model"\n{case["weights"]}\n'
    wanted = load_recipe(str(make_recipe(tmp_path / "r", toml)))
    assert differences(changed({}), wanted) == case["differences"]


def test_a_base_image_with_another_digest(tmp_path: Path) -> None:
    toml = f'[image]\nbase_digest = "sha256:{"4" * 64}"\n'
    wanted = load_recipe(str(make_recipe(tmp_path / "r", toml)))
    base = f"docker.io/library/python@sha256:{'3' * 64}"
    assert differences(changed({}), wanted) == [f"it locks base image {base}, not sha256:{'4' * 64}"]
    assert differences(changed({"image.base": base.replace("3" * 64, "4" * 64)}), wanted) == []


def test_a_finished_image_is_compared_by_digest(tmp_path: Path) -> None:
    digest, other = f"sha256:{'7' * 64}", f"sha256:{'8' * 64}"
    toml = f'[image]\ndockerfile = ""\nreference = "org/engine@{digest}"\n'
    wanted = load_recipe(str(make_recipe(tmp_path / "r", toml)))
    lock = changed({"image": {"reference": f"mirror/engine@{digest}"}})
    assert differences(lock, wanted) == []
    assert differences(lock, wanted, Settings(image=f"x@{other}")) == [
        f"it locks image mirror/engine@{digest}, not x@{other}"
    ]
    assert len(differences(changed({}), wanted)) == 1


TEMPLATE = '[chat_template]\nrepository = "org/t"\nrevision = "main"\nmount = "/t"\n'


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        ("", 0),
        (f'git_sha1 = "{"6" * 40}"\n', 0),
        (f'git_sha1 = "{"7" * 40}"\n', 1),
        ('path = "other.jinja"\n', 1),
    ],
)
def test_the_chat_template_is_compared(tmp_path: Path, lines: str, count: int) -> None:
    wanted = load_recipe(str(make_recipe(tmp_path / "r", TEMPLATE + lines)))
    file = {"path": "chat_template.jinja", "size": 1, "git_sha1": "6" * 40}
    lock = changed({"chat_template": {"repository": "org/t", "commit": "5" * 40, "file": file}})
    assert len(differences(lock, wanted)) == count
    assert differences(changed({}), wanted) == ["it locks no chat template"]
    moved = changed({"chat_template": {"repository": "org/u", "commit": "5" * 40, "file": file}})
    assert differences(moved, wanted) == [f"it locks the chat template of org/u at {'5' * 40}"]


def test_round_trip(tmp_path: Path, recipe: Recipe) -> None:
    path = lock_path(tmp_path / ".env")
    lock = changed({})
    assert path == tmp_path / "sparkserve.lock.json"
    assert read_lock(path, recipe, Settings()) is None
    write_lock(path, lock)
    assert read_lock(path, recipe, Settings()) == lock
    write_lock(path, lock)
    assert json.loads(path.read_text())["schema"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_lock_of_others_is_refused_with_every_reason(tmp_path: Path, recipe: Recipe) -> None:
    path = tmp_path / "lock.json"
    write_lock(path, changed({"recipe": "other", "weights.0.repository": "org/other"}))
    with pytest.raises(SparkserveError) as caught:
        read_lock(path, recipe, Settings())
    assert len(flatten(caught.value)) == 2
    assert caught.value.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("", ""),
        ("{", ""),
        ("[]", ""),
        ("null", ""),
        ('{"schema": 1}', "recipe"),
        (MINIMAL.read_text().replace('"schema": 1', '"schema": 2'), "schema"),
        (MINIMAL.read_text().replace('"recipe"', '"recip"'), "recipe"),
        (MINIMAL.read_text().replace("1" * 40, "1" * 39), "weights.0.commit"),
        (MINIMAL.read_text().replace("1" * 40, "../" + "1" * 40), "weights.0.commit"),
        (MINIMAL.read_text().replace("org/tiny", "../.."), "weights.0.repository"),
        (MINIMAL.read_text().replace("model.safetensors", "../../x"), "weights.0.files.0.path"),
        (MINIMAL.read_text().replace('"sha256"', '"sha257"'), "weights.0.files.0.sha257"),
        (MINIMAL.read_text().replace("a" * 64, "A" * 64), "weights.0.files.0.sha256"),
        (MINIMAL.read_text().replace('"size": 20', '"size": -1'), "weights.0.files.1.size"),
    ],
)
def test_a_broken_lock(tmp_path: Path, recipe: Recipe, text: str, where: str) -> None:
    path = tmp_path / "lock.json"
    path.write_text(text)
    with pytest.raises(SparkserveError) as caught:
        read_lock(path, recipe, Settings())
    assert (caught.value.code, caught.value.exit_code) == ("lock_broken", EXIT_USAGE)
    assert caught.value.message.startswith(": ".join(filter(None, (f"{path} is broken", where))) + ": ")
    assert caught.value.hint == "`sparkserve lock --update` makes it anew"


def test_a_lock_that_cannot_be_read_or_written(tmp_path: Path, recipe: Recipe) -> None:
    with pytest.raises(SparkserveError) as caught:
        read_lock(tmp_path, recipe, Settings())
    assert caught.value.code == "lock_unreadable"
    with pytest.raises(SparkserveError) as caught:
        write_lock(tmp_path / "none" / "lock.json", changed({}))
    assert caught.value.code == "lock_unwritable"


def test_a_write_that_fails_leaves_the_old_lock_whole(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    (path / "in the way").mkdir(parents=True)
    with pytest.raises(SparkserveError):
        write_lock(path, changed({}))
    assert [entry.name for entry in tmp_path.iterdir()] == ["lock.json"]
    assert (path / "in the way").is_dir()


def test_the_new_lock_is_another_file(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    write_lock(path, changed({}))
    with path.open() as old:
        write_lock(path, changed({"recipe": "other"}))
        assert json.load(old)["recipe"] == "minimal"
    assert json.loads(path.read_text())["recipe"] == "other"


def test_sizes_and_ids() -> None:
    lock = changed({})
    assert lock.total_bytes == 1020
    assert lock.weights_id == changed({"recipe": "other"}).weights_id
    assert lock.weights_id != changed({"weights.0.commit": "2" * 40}).weights_id
    assert len(lock.weights_id) == 12


@pytest.mark.parametrize("name", ["base", "reference"])
def test_an_image_that_docker_would_take_for_an_option(name: str) -> None:
    with pytest.raises(ValidationError, match=f"image.{name}"):
        changed({f"image.{name}": f"--mount=type=bind,src=/,dst=/host@sha256:{'3' * 64}"})
