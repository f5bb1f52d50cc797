"""Derived files on two nodes with directories of their own: tensors by their offsets, and files of the recipe."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkserve import derive
from sparkserve.cluster import Cluster, Deployment, Node
from sparkserve.errors import SparkserveError, flatten
from sparkserve.hosts import LocalHost
from sparkserve.lock import Lock, LockedImage
from sparkserve.manifest import Manifest, ManifestFile
from sparkserve.plan import Plan, apply
from sparkserve.recipe import Derived, Recipe
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from tests.fakes import RecordingReporter

RECIPE = "tensorfold-1017-bf16-overrides"
Tensors = dict[str, tuple[str, list[int], bytes]]


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def read_safetensors(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    assert (8 + length) % 8 == 0, "the data begin at a multiple of eight"
    return {name: (item["dtype"], item["shape"], data[slice(*item["data_offsets"])]) for name, item in header.items()}


def tensor(name: str, *, dtype: str = "BF16") -> tuple[str, list[int], bytes]:
    data = hashlib.sha256(name.encode()).digest()[:12]
    return dtype, [2, 3], data


def shards(**changes: str) -> list[Tensors]:
    """Two files in which layers 9 to 37 lie unordered among tensors that are not wanted."""
    names = [f"layers.{layer}.attn.wo_b.weight" for layer in range(9, 38)]
    names += [f"layers.{layer}.ffn.shared_experts.w2.weight" for layer in range(9, 38)]
    names += [f"layers.{layer}.ffn.experts.7.w2.weight" for layer in range(9, 38)]
    files: list[Tensors] = [{}, {}]
    for index, name in enumerate(names):
        files[index % 2][changes.get(name, name)] = tensor(name, dtype="I16" if "experts.7" in name else "BF16")
    return files


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(RECIPE)


def deploy(recipe: Recipe, root: Path, files: list[Tensors]) -> Deployment:
    """Put the source's files on both nodes; the nodes share nothing."""
    source = next(weights for weights in recipe.weights if weights.name == "uncensored")
    listed = []
    for number, tensors in enumerate(files):
        for role in ("head", "worker"):
            path = root / role / "models" / source.repository / source.revision / f"model-{number}.safetensors"
            write_safetensors(path, tensors)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        listed.append(
            ManifestFile(path=path.name, size=path.stat().st_size, sha256=digest, git_sha1=None),
        )
    manifest = Manifest(name=source.name, repository=source.repository, commit=source.revision, files=tuple(listed))
    places = {
        "models_dir": root / "head/models",
        "cache_dir": root / "head/cache",
        "worker_models_dir": root / "worker/models",
        "worker_cache_dir": root / "worker/cache",
    }
    settings = Settings.model_validate(places)
    lock = Lock(schema=1, recipe=recipe.name, weights=(manifest,), image=LockedImage())
    return Deployment(
        settings, recipe, lock, Cluster(*(Node(role, LocalHost(role), settings) for role in ("head", "worker")))
    )


@pytest.fixture
def deployment(recipe: Recipe, tmp_path: Path) -> Iterator[Deployment]:
    found = deploy(recipe, tmp_path, shards())
    yield found
    for node in found.cluster.nodes:
        node.close()


def plan(deployment: Deployment) -> Plan:
    facts = deployment.cluster.on_both(lambda node: derive.gather(node, deployment))
    return Plan(tuple(derive.plan(deployment, facts)))


def carry_out(deployment: Deployment) -> RecordingReporter:
    reporter = RecordingReporter()
    apply(plan(deployment), reporter).raise_failures()
    return reporter


def places(deployment: Deployment) -> list[Path]:
    (item,) = deployment.recipe.derived
    return [Path(derive.path_on(node, deployment, item)) for node in deployment.cluster.nodes]


def problem(recipe: Recipe, root: Path, files: list[Tensors], spoil: Callable[[bytes], bytes] = bytes) -> str:
    """Say what both nodes say of files that do not fit; nothing may be left of the try."""
    deployment = deploy(recipe, root, files)
    for path in root.rglob("model-1.safetensors"):
        path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(SparkserveError) as caught:
        carry_out(deployment)
    errors = flatten(caught.value)
    assert {error.code for error in errors} == {"derive_failed"}
    assert sorted(error.node for error in errors) == ["head", "worker"]
    assert not list(root.rglob("cache/**/*overrides*"))
    for node in deployment.cluster.nodes:
        node.close()
    return errors[0].message


def test_the_54_matrices_are_taken_whole_in_the_order_of_layers(deployment: Deployment) -> None:
    wanted = plan(deployment)
    assert [(change.node, change.before, change.after) for change in wanted.changes] == [
        (role, "absent", "54 tensors of uncensored") for role in ("head", "worker")
    ]
    assert wanted.changes[0].needs[0] == "head/download/uncensored/model-0.safetensors"
    assert wanted.changes[1].needs[0] == "worker/sync/uncensored/model-0.safetensors"
    proofs = [event[2] for event in carry_out(deployment).events if event[0] == "finished"]
    assert all("54 tensors" in proof and "sha256 " in proof for proof in proofs)
    head, worker = (read_safetensors(path) for path in places(deployment))
    names = [
        f"layers.{layer}.{part}.weight" for layer in range(10, 37) for part in ("attn.wo_b", "ffn.shared_experts.w2")
    ]
    assert list(head) == names
    assert all(head[name] == tensor(name) for name in names)
    assert places(deployment)[0].read_bytes() == places(deployment)[1].read_bytes()
    assert worker == head
    assert plan(deployment).is_empty


def test_a_file_that_was_touched_is_made_anew(deployment: Deployment) -> None:
    carry_out(deployment)
    _, worker = places(deployment)
    worker.write_bytes(b"something else")
    assert [change.node for change in plan(deployment).changes] == ["worker"]
    carry_out(deployment)
    assert plan(deployment).is_empty
    assert places(deployment)[0].read_bytes() == worker.read_bytes()


def test_another_rule_or_source_is_another_file(deployment: Deployment, recipe: Recipe, tmp_path: Path) -> None:
    (item,) = recipe.derived
    node = deployment.cluster.head
    other = item.model_copy(update={"layers": (10, 35)})
    assert derive.path_on(node, deployment, item) != derive.path_on(node, deployment, other)
    changed = deploy(recipe, tmp_path / "other", shards(**{"layers.10.attn.wo_b.weight": "x"}))
    assert Path(derive.path_on(node, deployment, item)).parent.name != places(changed)[0].parent.name


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (shards(**{"layers.20.attn.wo_b.weight": "layers.20.attn.wo_c.weight"}), r"0 of .*layers\\.20.*wo_b"),
        ([*shards(), {"model.layers.10.attn.wo_b.weight": tensor("twice")}], r"2 of .*layers\\.10"),
        ([*shards(**{"layers.36.attn.wo_b.weight": "x"}), {"layers.36.attn.wo_b.weight": tensor("t", dtype="F32")}],
         "is F32; needed: BF16"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(recipe: Recipe, tmp_path: Path, files: list[Tensors], words: str) -> None:
    assert re.search(words, problem(recipe, tmp_path, files))


@pytest.mark.parametrize("content", [b"", b"\xff" * 40, struct.pack("<Q", 4) + b"none" + b"\0" * 20])
def test_a_file_that_is_no_safetensors_is_named(recipe: Recipe, tmp_path: Path, content: bytes) -> None:
    message = problem(recipe, tmp_path, shards(), lambda _: content)
    assert "model-1.safetensors is no safetensors file" in message


def test_a_tensor_behind_the_end_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    assert "ends behind the file" in problem(recipe, tmp_path, shards(), lambda content: content[:-1])


def test_a_file_of_the_recipe_is_put_on_both_nodes(tmp_path: Path) -> None:
    mia = load_recipe("vllm-mia-exl3")
    names = ("models_dir", "cache_dir", "worker_models_dir", "worker_cache_dir")
    settings = Settings.model_validate({name: tmp_path / name for name in names})
    lock = Lock(schema=1, recipe=mia.name, weights=(), image=LockedImage())
    cluster = Cluster(*(Node(role, LocalHost(role), settings) for role in ("head", "worker")))
    deployment = Deployment(settings, mia, lock, cluster)
    carry_out(deployment)
    assert [path.read_bytes() for path in places(deployment)] == [mia.file("engram-index.json")] * 2
    assert plan(deployment).is_empty
    mounts = derive.mounts_on(cluster.worker, deployment)
    assert mounts["/engram-src/model.safetensors.index.json"].startswith(str(tmp_path / "worker_cache_dir"))
    for node in cluster.nodes:
        node.close()


def test_files_of_one_name_in_two_places_are_two_files(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / "r").mkdir(exist_ok=True)
        (tmp_path / "r" / name).write_text(name)
    places = {"/a/x.py": "a.py", "/b/x.py": "b.py", "/c/x.py": "a.py"}
    tables = "".join(f'[[derived]]\nname = "x.py"\nfile = "{file}"\nmount = "{at}"\n' for at, file in places.items())
    (tmp_path / "r/recipe.toml").write_text(f'schema = 1\nextends = "smoke"\nname = "r"\n{tables}')
    settings = Settings.model_validate({"cache_dir": tmp_path / "head", "worker_cache_dir": tmp_path / "worker"})
    recipe = load_recipe(str(tmp_path / "r"))
    cluster = Cluster(*(Node(role, LocalHost(role), settings) for role in ("head", "worker")))
    deployment = Deployment(settings, recipe, Lock(schema=1, recipe="r", weights=(), image=LockedImage()), cluster)
    assert len(plan(deployment).changes) == 4, "what is the same content is one file"
    carry_out(deployment)
    assert plan(deployment).is_empty
    for node in cluster.nodes:
        assert {at: Path(path).read_text() for at, path in derive.mounts_on(node, deployment).items()} == places
        node.close()


def test_a_recipe_counts_its_matrices(recipe: Recipe) -> None:
    (item,) = recipe.derived
    assert isinstance(item, Derived)
    assert item.count == 54
