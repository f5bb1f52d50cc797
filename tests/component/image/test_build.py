"""Building, proving and pulling an engine image with a scripted `docker`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from sparkserve import image_facts
from sparkserve.cluster import Deployment
from sparkserve.errors import SparkserveError
from sparkserve.image_build import log_path
from sparkserve.plan import Cancelled
from sparkserve.recipe import Recipe
from tests.component.fake_docker import FakeDocker
from tests.component.image.stage import (
    DIGEST,
    build,
    interrupted_when,
    is_gone,
    lock_of,
    make_deployment,
    plan,
    ship,
    tag,
)
from tests.fakes import RecordingWork
from tests.lab.git_area import publish_commit
from tests.lab.hub import Hub
from tests.unit.cases import wait_for


def test_a_disk_that_takes_no_answer_of_the_engine_keeps_no_image_from_its_name(
    deployment: Deployment, docker: FakeDocker, tmp_path: Path
) -> None:
    (tmp_path / "state/sparkserve/image-flags.json").mkdir(parents=True)
    assert build(deployment).endswith("starts and knows all 3 flags")
    assert set(docker.read("head")) == {tag(deployment)}


def test_a_build_is_proved_and_then_named(deployment: Deployment, docker: FakeDocker) -> None:
    work = RecordingWork()
    proof = build(deployment, work)
    assert proof == "2 layers, 0.00 GB, amd64, starts and knows all 3 flags"
    built = docker.read("built")
    assert set(built["files"]) == {"Dockerfile", "patches/one.diff", "engine/run", "engine/src/deep.txt"}
    assert built["arguments"] == {"BASE": f"registry.lab/base@{DIGEST}", "MAX_JOBS": "2"}
    assert built["environment"]["DOCKER_BUILDKIT"] == "0"
    head = docker.read("head")
    assert set(head) == {tag(deployment)}
    assert head[tag(deployment)]["labels"] == image_facts.labels_of(deployment.recipe, deployment.lock)
    (run,) = docker.calls("run")
    assert run[run.index("--network") + 1] == "none"
    assert run[run.index("--entrypoint") + 1] == "/opt/engine/run"
    assert run[run.index("--gpus") + 1] == "all", "as the launch, since an engine's help may load CUDA"
    assert run[-4:] == [f"{tag(deployment)}-candidate", "now", "serve", "--help"]
    assert "[internal] load build definition from Dockerfile" in work.notes
    assert "#1 DONE" in log_path(tag(deployment)).read_text()
    assert not (Path(deployment.cluster.head.cache_dir) / "builds").exists()
    assert [change.step for change in plan(deployment)] == ["ship"]


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ({"buildx": True}, ("1", "1")),
        ({"client": "20.10.24+dfsg1"}, ("1", "1")),
        ({"client": "29.0.0"}, ("0", "")),
    ],
)
def test_buildkit_is_used_where_the_machine_has_it(
    deployment: Deployment, docker: FakeDocker, behaviour: dict[str, Any], expected: tuple[str, str]
) -> None:
    docker.behave(**behaviour)
    build(deployment)
    environment = docker.read("built")["environment"]
    assert (environment["DOCKER_BUILDKIT"], environment["BUILDX_NO_DEFAULT_ATTESTATIONS"]) == expected
    (call,) = docker.calls("build")
    assert ("--progress" in call) == (expected[0] == "1")


def test_the_engine_is_fetched_once(deployment: Deployment, docker: FakeDocker, engine: tuple[str, str]) -> None:
    build(deployment)
    Path(engine[0]).rename(engine[0] + ".away")
    docker.write("head", {})
    build(deployment)
    assert set(docker.read("head")) == {tag(deployment)}


def test_a_plain_file_server_gives_the_engine_too(recipe: Recipe, docker: FakeDocker, tmp_path: Path) -> None:
    first = publish_commit(tmp_path / "git", "engine", {"run": "first"})
    publish_commit(tmp_path / "git", "engine", {"run": "second"})
    with Hub(tmp_path / "git", hub_name="", content_name="") as hub:
        lock = lock_of(recipe, f"{hub.endpoint}/git/engine.git", first)
        build(make_deployment(recipe, docker, tmp_path, lock))
    assert docker.read("built")["files"]["engine/run"] == "first"


def test_a_commit_that_is_nowhere(recipe: Recipe, docker: FakeDocker, tmp_path: Path, engine: tuple[str, str]) -> None:
    with pytest.raises(SparkserveError) as caught:
        build(make_deployment(recipe, docker, tmp_path, lock_of(recipe, engine[0], "3" * 40)))
    assert caught.value.code == "engine_revision"
    assert "3" * 40 in caught.value.message
    assert docker.calls("build") == []


def test_a_repository_that_is_gone(recipe: Recipe, docker: FakeDocker, tmp_path: Path) -> None:
    with pytest.raises(SparkserveError) as caught:
        build(make_deployment(recipe, docker, tmp_path, lock_of(recipe, str(tmp_path / "nowhere.git"))))
    assert caught.value.code == "source_unreachable"
    assert "SPARKSERVE_ENGINE_REPOSITORY" in caught.value.hint


def test_a_failed_build_shows_the_end_of_its_log(deployment: Deployment, docker: FakeDocker) -> None:
    docker.behave(build="fail")
    with pytest.raises(SparkserveError) as caught:
        build(deployment)
    assert caught.value.code == "build_failed"
    assert caught.value.details.endswith("pip changed packages of the base image")
    assert str(log_path(tag(deployment))) in caught.value.hint
    assert docker.read("head") == {}


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        ({"help": "usage: engine serve [--rank N] [--no-thinking]"}, "image_flags", "does not know --thinking"),
        ({"help": "usage: engine serve [--ranks N] [--thinking] [--no-thinking]"}, "image_flags", "know --rank"),
        ({"run_code": 127}, "image_entrypoint", "`/opt/engine/run now serve --help` ends with 127"),
        ({"labels": {"sparkserve.engine.commit": "mine"}}, "image_labels", "sparkserve.engine.commit is 'mine'"),
        ({"architecture": "arm64"}, "image_architecture", "for arm64; needed: amd64"),
        ({"head_free": 10}, "no_room", "/docker has 10 bytes free; needed to build the image: 1,000,000"),
    ],
)
def test_an_image_that_is_not_proved_gets_no_name(
    deployment: Deployment, docker: FakeDocker, behaviour: dict[str, Any], code: str, words: str
) -> None:
    docker.behave(**behaviour)
    with pytest.raises(SparkserveError) as caught:
        build(deployment)
    assert caught.value.code == code
    assert words in caught.value.message
    assert docker.read("head") == {}


def test_an_image_is_asked_for_the_flags_that_no_recipe_asked_it_for(
    deployment: Deployment, docker: FakeDocker
) -> None:
    build(deployment)
    ship(deployment)
    launch = deployment.recipe.launch
    changed = launch.model_copy(update={"argv": (*launch.argv, "--mtp-drafts", "2")})
    sharing = replace(deployment, recipe=deployment.recipe.model_copy(update={"launch": changed}))
    assert tag(sharing) == tag(deployment)
    (change,) = plan(sharing)
    assert (change.step, change.before) == ("flags", "there; not asked whether its engine knows --mtp-drafts")
    docker.behave(help="usage: engine serve [--rank N] [--thinking] [--no-thinking]")
    with pytest.raises(SparkserveError, match="does not know --mtp-drafts"):
        change.action(RecordingWork())
    assert plan(sharing) == [change], "what was refused is asked again"
    docker.behave()
    assert change.action(RecordingWork()).endswith("starts and knows all 4 flags")
    assert plan(sharing) == plan(deployment) == []
    assert len(docker.calls("build")) == 1
    docker.behave(labels={"made": "anew"})
    build(replace(deployment, build_options=("--no-cache",)))
    assert [change.before for change in plan(sharing)] == [change.before], "another image may know other flags"


def test_a_flag_of_the_owner_is_asked_for_too(deployment: Deployment, docker: FakeDocker) -> None:
    build(deployment)
    ship(deployment)
    for extra, words in (("--no-such-flag", "does not know --no-such-flag"), ("--thinking.depth=2 --rank 1 -q", "")):
        settings = deployment.settings.model_copy(update={"extra_args": tuple(extra.split())})
        changes = plan(replace(deployment, settings=settings))
        assert [change.step for change in changes] == (["flags"] if words else [])
        if words:
            with pytest.raises(SparkserveError, match=words) as caught:
                changes[0].action(RecordingWork())
            assert "SPARKSERVE_EXTRA_ARGS" in caught.value.hint


def changed(deployment: Deployment, **tables: dict[str, Any]) -> Deployment:
    recipe = deployment.recipe
    update = {name: getattr(recipe, name).model_copy(update=values) for name, values in tables.items()}
    return replace(deployment, recipe=recipe.model_copy(update=update))


def test_each_of_two_programs_is_asked_for_its_own_flags(deployment: Deployment, docker: FakeDocker) -> None:
    worker = {"worker_entrypoint": ("/opt/engine/lend",), "worker_argv": ("--rank", "1")}
    two = changed(deployment, launch=worker, container={"gpus": False})
    assert build(two).endswith("starts and knows all 3 flags")
    runs = docker.calls("run")
    assert [run[run.index("--entrypoint") + 1] for run in runs] == ["/opt/engine/run", "/opt/engine/lend"]
    assert not [run for run in runs if "--gpus" in run]
    ship(two)
    assert plan(two) == []
    other = changed(two, launch={**worker, "worker_argv": ("--port", "1")})
    with pytest.raises(SparkserveError, match="does not know --port"):
        plan(other)[0].action(RecordingWork())


def test_an_image_of_its_base_and_the_recipes_files_alone(recipe: Recipe, docker: FakeDocker, tmp_path: Path) -> None:
    bare = lock_of(recipe, repository="", commit="")
    deployment = make_deployment(recipe, docker, tmp_path, bare)
    assert set(image_facts.labels_of(recipe, bare)) == {"sparkserve.recipe", "sparkserve.context"}
    assert plan(deployment)[0].after == "built on registry.lab/base:1"
    build(deployment)
    assert set(docker.read("built")["files"]) == {"Dockerfile", "patches/one.diff"}
    ship(deployment)
    assert plan(deployment) == []


def test_a_build_that_is_asked_for_by_hand(deployment: Deployment, docker: FakeDocker) -> None:
    build(deployment)
    ship(deployment)
    assert plan(deployment) == []
    forced = replace(deployment, build_options=("--no-cache", "--pull"))
    assert plan(forced)[0].before == "there, but --no-cache --pull"
    build(forced)
    assert [call[1:3] for call in docker.calls("build")] == [["--file", ANY], ["--no-cache", "--pull"]]
    assert plan(deployment) == [], "the same layers came out of it"


@pytest.mark.parametrize("where", ["build", "run"])
def test_an_interrupted_build_ends_docker_and_leaves_no_name(
    deployment: Deployment, docker: FakeDocker, where: str
) -> None:
    docker.behave(hang=where)
    pid_file = docker.directory / f"{where}.pid"

    with pytest.raises(Cancelled):
        build(deployment, interrupted_when(pid_file))
    wait_for(lambda: is_gone(pid_file), "the docker command has ended")
    assert docker.read("head") == {}
    if where == "run":
        assert docker.calls("rm", "--force"), "the container is taken away too"


# -- pulling ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(recipe: Recipe, docker: FakeDocker, tmp_path: Path) -> Deployment:
    reference = f"a/b@{DIGEST}"
    changes = {"dockerfile": "", "reference": reference}
    other = recipe.model_copy(update={"image": recipe.image.model_copy(update=changes)})
    return make_deployment(other, docker, tmp_path, lock_of(other, reference=reference))


def test_a_finished_image_is_pulled_proved_and_named(finished: Deployment, docker: FakeDocker) -> None:
    work = RecordingWork()
    build(finished, work)
    assert docker.calls("pull") == [["pull", f"a/b@{DIGEST}"]]
    assert "1 of 1 layers" in work.notes
    assert tag(finished) in docker.read("head")
    head = docker.read("head")
    del head[tag(finished)]
    docker.write("head", head)
    build(finished)
    assert len(docker.calls("pull")) == 1, "what is there is not pulled again"


def test_a_finished_image_is_pulled_again_when_asked(finished: Deployment, docker: FakeDocker) -> None:
    build(finished)
    build(replace(finished, build_options=("--pull",)))
    assert len(docker.calls("pull")) == 2
    with pytest.raises(SparkserveError, match="names a finished image") as caught:
        plan(replace(finished, build_options=("--no-cache",)))
    assert caught.value.code == "nothing_to_build"


def test_an_id_that_is_not_there_is_not_pulled(recipe: Recipe, docker: FakeDocker, tmp_path: Path) -> None:
    finished = recipe.model_copy(update={"image": recipe.image.model_copy(update={"dockerfile": ""})})
    deployment = make_deployment(finished, docker, tmp_path, lock_of(finished, reference=DIGEST))
    with pytest.raises(SparkserveError, match="no image with the id sha256:0000") as caught:
        build(deployment)
    assert "docker load" in caught.value.hint
    assert docker.calls("pull") == []


def test_a_pull_that_fails(finished: Deployment, docker: FakeDocker) -> None:
    docker.behave(pull="fail")
    with pytest.raises(SparkserveError) as caught:
        build(finished)
    assert (caught.value.code, caught.value.details.splitlines()[-1]) == ("pull_failed", "denied")


def test_a_finished_image_of_another_architecture_is_refused(finished: Deployment, docker: FakeDocker) -> None:
    docker.behave(architecture="arm64")
    with pytest.raises(SparkserveError, match="for arm64; needed: amd64"):
        build(finished)
    assert tag(finished) not in docker.read("head")
