"""The room that a plan needs on each node, by file system: what is there already is not asked for again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sparkserve import doctor, image
from sparkserve.cluster import ROLES, Deployment, Node
from sparkserve.image_facts import Facts, ImageFacts
from sparkserve.inventory import list_items
from sparkserve.plan import Change, Plan, Work
from sparkserve.planning import look_for_weights
from sparkserve.preflight import disk_needs
from tests.component.weights_stage import KIB, RECIPE, Pair
from tests.lab.model_repo import make_bench_repo
from tests.lab.repo_store import ModelRepo

SIZES = [3 << 20, 700 * KIB, 300 * KIB]
LARGE = "file-00001.bin"


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> ModelRepo:
    return make_bench_repo(tmp_path_factory.mktemp("repos"), SIZES)


def needs(stage: Pair, *more: Change) -> dict[tuple[str, str, str], int]:
    found = disk_needs(stage.deployment, Plan((*stage.changes(), *more), later(stage)))
    return {(need.node, need.place, need.what): need.size for need in found if need.size}


def later(stage: Pair) -> tuple[Change, ...]:
    """Give what `up` makes after the weights: the image, where the recipe says how large one is."""
    deployment = stage.deployment
    if not deployment.recipe.image.expected_bytes:
        return ()
    return tuple(image.plan(deployment, deployment.cluster.on_both(lambda node: image.gather(node, deployment))))


def change(node: str, step: str, size: int) -> Change:
    def act(work: Work) -> str:
        raise AssertionError("only counted")

    return Change(node, step, "x", "absent", "there", act, size=size)


def test_missing_files_count_whole_and_partials_what_is_left(stage: Pair) -> None:
    assert needs(stage) == {(role, "models", "weights"): sum(SIZES) for role in ("head", "worker")}
    (item,) = [item for item in list_items(stage.deployment.lock) if item.file.path == LARGE]
    partial = Path(item.partial_path(stage.node("worker")))
    partial.parent.mkdir(parents=True)
    with partial.open("wb") as file:
        file.write(bytes(1 << 20))
        file.truncate(SIZES[0])
    found = needs(stage)
    assert found["worker", "models", "weights"] == sum(SIZES) - (1 << 20)
    assert found["head", "models", "weights"] == sum(SIZES)


def test_adopted_files_and_files_that_only_need_a_proof_take_no_room(stage: Pair, tmp_path: Path) -> None:
    stage.fill("worker")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / LARGE).write_bytes(stage.repo.source(LARGE).read_bytes())
    look_for_weights(stage.deployment, [f"head:{theirs}"], print, only_assume=True)
    assert needs(stage) == {("head", "models", "weights"): sum(SIZES[1:])}


def test_a_file_that_is_short_is_fetched_whole_beside_itself(stage: Pair) -> None:
    stage.fill("head", "worker")
    with stage.path("worker", LARGE).open("r+b") as file:
        file.truncate(SIZES[0] - 1)
    assert needs(stage) == {("worker", "models", "weights"): SIZES[0]}


def test_an_image_takes_its_size_where_it_is_saved_and_twice_where_it_is_loaded(stage: Pair) -> None:
    stage.fill("head", "worker")
    found = needs(stage, change("head", "build", 100), change("worker", "ship", 100), change("worker", "derive", 7))
    assert found == {
        ("head", "docker", "engine image"): 200,
        ("worker", "docker", "engine image"): 200,
        ("worker", "cache", "derived files"): 7,
    }


@pytest.mark.parametrize("step", ["start", "download", "sync"])
def test_a_first_start_writes_its_caches_on_both_nodes(stage: Pair, step: str) -> None:
    stage.fill("head", "worker")
    recipe = RECIPE.model_copy(update={"memory": RECIPE.memory.model_copy(update={"first_start_disk_bytes": 106})})
    stage = Pair(replace(stage.deployment, recipe=recipe), stage.repo)
    found = needs(stage, change("head", step, 0))
    assert found == {(role, "cache", "what the first start writes"): 106 for role in ("head", "worker")}


def test_doctor_and_start_need_the_same_room(stage: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(node: Node, deployment: Deployment) -> Facts:
        there = ImageFacts(("a",), {}, "arm64", 90) if node.role == "head" else None
        return Facts(there, 10**12, "/var/lib/docker")

    monkeypatch.setattr(image, "gather", gather)
    memory = RECIPE.memory.model_copy(update={"first_start_disk_bytes": 106})
    update = {"memory": memory, "image": RECIPE.image.model_copy(update={"expected_bytes": 100})}
    stage = Pair(replace(stage.deployment, recipe=RECIPE.model_copy(update=update)), stage.repo)
    wanted = disk_needs(stage.deployment, Plan((*stage.changes(), *later(stage), change("head", "start", 0))))
    found = doctor._find_needs(stage.deployment, ROLES, plans=True)
    assert [need for need in found if need.size] == [need for need in wanted if need.size]
    assert [need.size for need in wanted if need.place == "docker"] == [90, 180]


@pytest.mark.parametrize(
    ("there", "expected"), [({}, (200, 200)), ({"head": ("a",)}, (90, 180)), (dict.fromkeys(ROLES, ("a",)), (0, 0))]
)
@pytest.mark.parametrize("step", ["download", "sync"])
def test_before_weights_are_fetched_the_image_after_them_counts(
    stage: Pair,
    monkeypatch: pytest.MonkeyPatch,
    there: dict[str, tuple[str, ...]],
    expected: tuple[int, int],
    step: str,
) -> None:
    def gather(node: Node, deployment: Deployment) -> Facts:
        layers = there.get(node.role)
        return Facts(ImageFacts(layers, {}, "arm64", 90) if layers else None, 10**12, "/var/lib/docker")

    monkeypatch.setattr(image, "gather", gather)
    stage.fill("head", "worker")
    recipe = RECIPE.model_copy(update={"image": RECIPE.image.model_copy(update={"expected_bytes": 100})})
    stage = Pair(replace(stage.deployment, recipe=recipe), stage.repo)
    needed = {(role, "docker", "engine image"): size for role, size in zip(ROLES, expected, strict=True) if size}
    assert needs(stage, change("head", step, 0)) == needed
