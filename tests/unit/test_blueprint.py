"""A plan without hosts: from what was seen, or with named places, for every setting of the owner."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from sparkserve import blueprint, cli
from sparkserve.blueprint import Seen, draw, load_facts, save_facts
from sparkserve.errors import SparkserveError
from sparkserve.lock import Lock, LockedImage, LockedTemplate, write_lock
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from tests.unit.deployments import LINKS, make_lock, make_pair
from tests.unit.test_recipe_golden import SEEN

RECIPE = load_recipe("tensorfold-1017")


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    code = cli._run([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_without_facts_everything_unknown_is_a_named_place(home: Path) -> None:
    drawn = draw(Settings(), RECIPE, None, None)
    head, worker = drawn.specs["head"], drawn.specs["worker"]
    assert drawn.age is None
    assert not drawn.locked
    assert worker.env["NCCL_SOCKET_IFNAME"] == "<worker.link.interface>"
    assert head.argv[head.argv.index("--master") + 1] == "<head.link.address>"
    sources = {mount.target: mount.source for mount in worker.mounts}
    assert sources["/engram/*"] == ("<worker.home>/sparkserve/models/deepseek-ai/DeepSeek-V4.1-Flash-1017/1bae0e10/*")
    assert head.mounts[0].source.startswith(str(home))
    assert {"worker.link.hcas", "image.id", "weights.id"} <= {*worker.unresolved}
    assert head.image == "sparkserve/tensorfold-1017:<image.id>"


def test_a_plan_from_memory_asks_no_node() -> None:
    node = blueprint._known_node(Settings(), "worker", blueprint.Place(home="/home/spark"))
    with pytest.raises(SparkserveError) as caught:
        node.host.run(["true"])
    assert (caught.value.code, caught.value.hint) == ("not_looked", "sparkserve plan --live")


def test_the_settings_count_without_facts() -> None:
    settings = Settings.model_validate({"head_link": "10.0.0.1", "worker_cache_dir": "/fast/cache", "context": 4096})
    drawn = draw(settings, RECIPE, None, None)
    head, worker = drawn.specs["head"], drawn.specs["worker"]
    assert worker.argv[worker.argv.index("--master") + 1] == "10.0.0.1"
    assert worker.argv[worker.argv.index("--context") + 1] == "4096"
    assert {mount.source for mount in worker.mounts if mount.target == "/cache/ranks"} == {
        "/fast/cache/ranks/<weights.id>"
    }
    assert head.env["NCCL_SOCKET_IFNAME"] == "<head.link.interface>"


def test_facts_fill_the_places_and_a_lock_the_rest() -> None:
    drawn = draw(Settings(), RECIPE, make_lock(RECIPE), SEEN)
    assert drawn.locked
    assert drawn.age is not None
    assert [spec.unresolved for spec in drawn.specs.values()] == [(), ()]
    assert drawn.specs["worker"].env["NCCL_IB_GID_INDEX"] == "5"


def test_facts_of_another_cable_do_not_count() -> None:
    drawn = draw(Settings.model_validate({"worker_link": "192.168.7.2"}), RECIPE, None, SEEN)
    assert drawn.specs["worker"].env["NCCL_SOCKET_IFNAME"] == "<worker.link.interface>"
    assert drawn.specs["head"].env["NCCL_SOCKET_IFNAME"] == "enp1s0f1np1"
    assert drawn.specs["worker"].mounts[0].source.startswith("/home/spark/")


def test_a_record_stands_for_the_nodes_although_its_addresses_are_replaced() -> None:
    settings = Settings.model_validate({"head_link": "192.168.7.1", "worker_link": "192.168.7.2"})
    record = SEEN.model_copy(update={"raw": {"head": {"identity": {}}}})
    drawn = draw(settings, RECIPE, make_lock(RECIPE), record)
    assert [spec.unresolved for spec in drawn.specs.values()] == [(), ()]


@pytest.mark.parametrize("place", ["directory", "/proc/facts"])
def test_facts_that_cannot_be_written_leave_nothing(tmp_path: Path, place: str) -> None:
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match=place.removeprefix("/proc/")):
        save_facts(tmp_path / place, SEEN)
    assert [one.name for one in tmp_path.iterdir()] == ["directory"]


def test_what_was_seen_comes_back(tmp_path: Path) -> None:
    seen = blueprint.see(make_pair(), LINKS)
    save_facts(tmp_path / "new/facts.json", seen)
    back = load_facts(tmp_path / "new/facts.json")
    assert back == seen
    assert back.nodes["worker"].hcas == LINKS["worker"].hcas
    assert list(back.nodes["worker"].adopted.values()) == ["/srv/hub/engram, of others/47.safetensors"]
    assert abs(back.seconds - time.time()) < 60


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "facts_unreadable"),
        ("{", "facts_broken"),
        ("{}", "facts_broken"),
        ('{"seconds": 0, "nodes": {}}', "facts_broken"),
    ],
)
def test_facts_that_are_none(tmp_path: Path, content: str | None, code: str) -> None:
    if content is not None:
        (tmp_path / "facts").write_text(content)
    with pytest.raises(SparkserveError) as caught:
        load_facts(tmp_path / "facts")
    assert caught.value.code == code


def test_plan_needs_no_settings_and_no_node(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(["plan"], capsys)
    assert code == 0
    head, worker = found["data"]["ranks"]
    assert (head["node"], worker["rank"]) == ("head", 1)
    assert worker["argv"][:3] == ["/opt/nvidia/nvidia_entrypoint.sh", "tensorfold", "serve"]
    assert "worker.link.interface" in worker["unresolved"]
    assert found["data"]["facts"]["age_seconds"] is None
    assert not list(home.iterdir()), "a plan writes nothing"


def test_plan_takes_the_facts_that_were_seen_last_and_tells_their_age(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_facts(home / "state/sparkserve/facts.json", Seen(seconds=time.time() - 7200, nodes=SEEN.nodes))
    write_lock(home / "sparkserve.lock.json", whole_lock())
    code, found = run(["plan"], capsys)
    assert (code, found["errors"]) == (0, [])
    assert found["data"]["locked"]
    assert 7200 <= found["data"]["facts"]["age_seconds"] < 7300
    assert [rank["unresolved"] for rank in found["data"]["ranks"]] == [[], []]
    assert cli._run(["plan"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"facts\.json, 2 ?h.* old; the lock", shown)
    assert "docker \\\n  run \\\n" in shown


def whole_lock() -> Lock:
    """Fill the small lock up until it fits its recipe."""
    lock, image = make_lock(RECIPE), RECIPE.image
    manifests = []
    for wanted, manifest in zip(RECIPE.weights, lock.weights, strict=True):
        count = wanted.files or 0
        files = tuple(manifest.files[0].model_copy(update={"path": f"file-{number}"}) for number in range(count))
        commit = wanted.revision + "0" * 32
        manifests.append(manifest.model_copy(update={"files": files, "commit": commit}))
    template = RECIPE.chat_template
    assert template is not None
    assert lock.chat_template is not None
    file = lock.chat_template.file.model_copy(update={"git_sha1": template.git_sha1})
    locked = LockedTemplate(repository=template.repository, commit=template.revision, file=file)
    base = f"nvcr.io/nvidia/pytorch@{image.base_digest}"
    made = LockedImage(base=base, engine_repository=image.engine_repository, engine_commit="1" * 40)
    return Lock(schema=1, recipe=RECIPE.name, weights=tuple(manifests), chat_template=locked, image=made)


def test_plan_from_a_file_of_facts_shows_warnings(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_facts(home / "seen.json", SEEN)
    words = ["plan", "--facts", "seen.json", "--recipe", "tensorfold-1017-bf16-overrides"]
    code, found = run(words, capsys)
    assert code == 0
    assert found["data"]["facts"]["basis"] == "facts of seen.json"
    assert any("NV_ERR_NO_MEMORY" in text for text in found["data"]["warnings"])
    assert cli._run(words) == 0
    assert "# warning: experimental" in capsys.readouterr().out


def test_a_whole_recipe_needs_no_lock_of_ours(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(["plan", "--recipe", "vllm-mia-exl3"], capsys)
    assert code == 0
    assert found["data"]["locked"]
    mounts = [word for word in found["data"]["ranks"][1]["command"] if word.startswith("--mount=")]
    assert len(mounts) == 45 + 3 + 1 + 1
    assert any("model-00047-of-00048.safetensors,target=/engram-src/" in word for word in mounts)
