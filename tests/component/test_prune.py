"""What can go: only what is ours, not wanted by the lock, and not held by a container."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from sparkserve.cluster import NodeSession
from sparkserve.errors import SparkserveError
from sparkserve.inventory import PARTIALS, list_items
from sparkserve.lock import Lock
from sparkserve.plan import Change, Plan, apply
from sparkserve.planning import look_for_weights
from sparkserve.prune import Wanted, plan, plan_build_cache, plan_logs
from tests.component.weights_stage import KIB, Pair, Silent, manifest_of, pair
from tests.lab.hub import Hub
from tests.lab.model_repo import make_bench_repo
from tests.lab.repo_store import ModelRepo

LARGE = "file-00001.bin"
NOW, OLD, BUSY = "0123456789ab", "ba9876543210", "abcdefabcdef"


@dataclass
class WithDocker:
    """A real node program beside a Docker engine of a few words."""

    session: NodeSession
    mounts: list[str] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    builds: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, do: str, **fields: Any) -> Any:
        docker = fields.pop("docker", [])
        answer = self.session.ask(do, **fields)
        if docker:
            containers = [{"ImageID": "sha256:used", "Mounts": [{"Source": path} for path in self.mounts]}]
            pages: dict[str, Any] = {
                "/containers/json?all=1": containers,
                "/images/json": self.images,
                "/system/df?type=build-cache": {"BuildCache": self.builds},
            }
            answer["docker"] = {page: {"status": 200, "body": pages[page]} for page in docker}
        return answer

    def close(self) -> None:
        self.session.close()


@pytest.fixture
def repo(tmp_path: Path) -> ModelRepo:
    return make_bench_repo(tmp_path / "repos", [400 * KIB, 100 * KIB])


@pytest.fixture
def stage(repo: ModelRepo, hub: Hub, tmp_path: Path) -> Iterator[Pair]:
    with pair(repo, hub.endpoint, tmp_path / "nodes") as found:
        worker = found.node("worker")
        worker.settings = worker.settings.model_copy(update={"cache_dir": tmp_path / "cache"})
        worker.__dict__["session"] = cast("NodeSession", WithDocker(worker.session))
        yield found


def docker(stage: Pair) -> WithDocker:
    return cast("WithDocker", stage.node("worker").session)


def found(stage: Pair, *folders: str, others: tuple[Lock, ...] = ()) -> list[Change]:
    cache = stage.node("worker").cache_dir
    apart = frozenset(f"{cache}/{name}" for name in folders)
    return plan(
        stage.node("worker"), Wanted((stage.deployment.lock, *others), frozenset({"sparkserve/lab:now"}), apart)
    )


def carry_out(changes: list[Change]) -> None:
    apply(Plan(tuple(changes)), Silent()).raise_failures()


def move_on(stage: Pair) -> Pair:
    """Lock a newer commit: one file changed, the others are the same."""
    stage.repo.change(LARGE, b"new" * 1000, branch="main")
    lock = stage.deployment.lock.model_copy(update={"weights": (manifest_of(stage.repo),)})
    return Pair(replace(stage.deployment, lock=lock), stage.repo)


def test_nothing_of_the_lock_is_listed(stage: Pair) -> None:
    stage.apply().raise_failures()
    assert found(stage) == []


def test_sets_of_another_lock_go_with_their_directories(stage: Pair) -> None:
    stage.apply().raise_failures()
    later = move_on(stage)
    later.apply().raise_failures()
    (change,) = found(later)
    before = stage.path("worker", LARGE).parent
    assert (change.resource, change.before, change.size) == (str(before), "weights of another lock", 500 * KIB)
    carry_out([change])
    assert not before.exists()
    assert found(later) == []
    later.assert_whole()


def test_weights_and_partials_of_another_lock_that_is_there_stay(stage: Pair) -> None:
    stage.apply().raise_failures()
    later = move_on(stage)
    assert [change.before for change in found(later)] == ["weights of another lock"]
    assert found(later, others=(stage.deployment.lock,)) == []
    (item,) = [item for item in list_items(later.deployment.lock) if item.file.path == LARGE]
    half = Path(item.partial_path(stage.node("worker")))
    half.parent.mkdir(parents=True, exist_ok=True)
    half.write_bytes(bytes(8192))
    assert [change.before for change in found(stage)] == ["partial files"]
    assert found(stage, others=(later.deployment.lock,)) == []


def test_files_of_others_in_such_a_directory_stay(stage: Pair) -> None:
    stage.apply().raise_failures()
    notes = stage.path("worker", "notes.txt")
    notes.write_text("mine")
    byhand = stage.path("worker", "by-hand.bin")
    shutil.copy(stage.path("worker", LARGE), byhand)
    carry_out(found(move_on(stage)))
    assert sorted(path.name for path in notes.parent.iterdir() if path.name != PARTIALS) == ["by-hand.bin", "notes.txt"]


def test_what_a_container_holds_stays(stage: Pair) -> None:
    stage.apply().raise_failures()
    docker(stage).mounts = [str(stage.path("worker", LARGE))]
    (change,) = found(move_on(stage))
    assert change.size == 100 * KIB


def test_what_was_adopted_from_an_older_set_of_ours_stays(stage: Pair) -> None:
    stage.apply().raise_failures()
    later = move_on(stage)
    models = stage.node("worker").models_dir
    carry_out(look_for_weights(later.deployment, [f"worker:{models}"], print))
    assert list(later.node("worker").adopted.values()) == [str(stage.path("worker", "file-00002.bin"))]
    (change,) = found(later)
    assert change.size == 400 * KIB
    carry_out([change])
    later.apply().raise_failures()
    assert later.changes() == []


def test_partials_that_no_download_goes_on_with(stage: Pair) -> None:
    (large,) = [item for item in list_items(stage.deployment.lock) if item.file.path == LARGE]
    going_on = Path(large.partial_path(stage.node("worker")))
    stale = [going_on.with_name("other.bin"), Path(stage.node("worker").models_dir, "o/n/c", PARTIALS, "x.journal")]
    for path in (going_on, *stale):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(8192))
    changes = found(stage)
    assert [(change.before, change.size) for change in changes] == [("partial files", 8192)] * 2
    carry_out(changes)
    assert (going_on.exists(), [path.exists() for path in stale]) == (True, [False, False])
    stage.apply().raise_failures()
    assert found(stage) == []


def test_caches_of_other_weights_and_images(stage: Pair, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for name in (f"ranks/{NOW}", f"ranks/{OLD}", f"ranks/{BUSY}", "ranks/my notes", f"other/{OLD}"):
        (cache / name).mkdir(parents=True)
        (cache / name / "rank1of2.bin").write_bytes(bytes(50_000))
    docker(stage).mounts = [str(cache / f"ranks/{BUSY}")]
    (change,) = found(stage, f"ranks/{NOW}", f"code/{NOW}")
    assert (change.resource, change.before) == (str(cache / f"ranks/{OLD}"), "ranks of other weights or images")
    assert 50_000 <= change.size < 70_000
    carry_out([change])
    assert sorted(path.name for path in (cache / "ranks").iterdir()) == sorted([NOW, BUSY, "my notes"])


def test_images_of_ours_that_no_container_uses(stage: Pair) -> None:
    ours = {"sparkserve.recipe": "lab"}
    docker(stage).images = [
        {"Id": "sha256:1", "RepoTags": ["sparkserve/lab:now"], "Labels": ours, "Size": 1},
        {"Id": "sha256:2", "RepoTags": ["sparkserve/lab:old", "mine:kept"], "Labels": ours, "Size": 2},
        {"Id": "sha256:used", "RepoTags": ["sparkserve/lab:runs"], "Labels": ours, "Size": 3},
        {"Id": "sha256:4", "RepoTags": None, "Labels": ours, "Size": 4},
        {"Id": "sha256:5", "RepoTags": ["<none>:<none>"], "Labels": None, "Size": 5},
        {"Id": "sha256:6", "RepoTags": ["debian:13"], "Labels": None, "Size": 6},
    ]
    changes = found(stage)
    assert [(change.resource, change.size) for change in changes] == [("sparkserve/lab:old", 2), ("sha256:4", 4)]
    docker(stage).images.reverse()  # those that were made within the same second come in any order
    assert found(stage) == changes


class Builder:
    """A Docker client that only prunes builds, and all of them."""

    def __init__(self, stand_in: WithDocker) -> None:
        self.stand_in = stand_in
        self.api = self

    def prune_builds(self, **how: Any) -> None:
        assert how == {"all": True}
        self.stand_in.builds = [part for part in self.stand_in.builds if part["InUse"]]

    def close(self) -> None: ...


def test_the_build_cache_goes_as_a_whole(stage: Pair) -> None:
    worker = stage.node("worker")
    assert plan_build_cache(worker) == []
    parts = [(1000, False, False), (200, False, False), (30, True, False), (4, False, True)]
    docker(stage).builds = [{"Size": size, "InUse": used, "Shared": shared} for size, used, shared in parts]
    worker.__dict__["docker"] = Builder(docker(stage))
    (change,) = plan_build_cache(worker)
    assert (change.before, change.size) == ("what builds of anybody left", 1200)
    assert apply(Plan((change,)), Silent()).applied[0].proof == "1200 bytes are gone"
    assert plan_build_cache(worker) == []


def test_an_engine_that_cannot_be_asked_stops_it(stage: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real = docker(stage).ask

    def ask(do: str, **fields: Any) -> Any:
        answer = real(do, **fields)
        if "docker" in answer:
            answer["docker"] = {page: {"error": "refused"} for page in answer["docker"]}
        return answer

    monkeypatch.setattr(docker(stage), "ask", ask)
    with pytest.raises(SparkserveError) as caught:
        found(stage)
    assert (caught.value.code, caught.value.exit_code) == ("docker_unreachable", 6)


def test_saved_logs_but_those_of_the_newest_run(tmp_path: Path) -> None:
    for run in ("20250101", "20250102", "20250103"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "rank0.log").write_text("x" * 100)
    (tmp_path / "20250101" / "record.json").write_text("{}")
    changes = plan_logs(tmp_path)
    assert sorted((Path(change.resource).name, change.size) for change in changes) == [
        ("20250101", 100),
        ("20250102", 100),
    ]
    carry_out(changes)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "20250101/record.json",
        "20250103/rank0.log",
    ]
