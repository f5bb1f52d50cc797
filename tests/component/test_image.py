"""The engine image: what its name depends on, and building, proving, pulling and shipping with a scripted `docker`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkserve import image
from sparkserve.cluster import Cluster, Deployment
from sparkserve.errors import DOCKER_PROBLEMS, SparkserveError
from sparkserve.hosts import LocalHost
from sparkserve.image_build import log_path
from sparkserve.image_ship import load_command
from sparkserve.lock import Lock, LockedImage
from sparkserve.plan import Cancelled, Change, Plan
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from sparkserve.ssh import SshTarget
from sparkserve.ssh_host import SshHost
from tests.component.fake_docker import BLOCK, FakeDocker
from tests.fakes import FakeSession, RecordingWork, make_node
from tests.lab.git_area import publish_commit
from tests.lab.hub import Hub
from tests.unit.cases import wait_for

DIGEST = "sha256:" + "0" * 64
RECIPE = """
schema = 1
name = "little"
title = "a little engine"
engine = "little"
[parameters]
model_name = "m"
context = 1024
[ports]
api = 8888
master = 29551
[[weights]]
name = "model"
repository = "a/b"
revision = "main"
mount = "/model"
[image]
dockerfile = "Dockerfile"
base = "registry.lab/base:1"
architecture = "amd64"
entrypoint = ["/opt/engine/run", "now"]
flags_help = ["serve", "--help"]
expected_bytes = 1_000_000
[launch]
argv = ["serve", "/model", "--rank", "${rank}"]
[[launch.switches]]
parameter = "thinking"
on = ["--thinking"]
off = ["--no-thinking"]
[memory]
required_gib = 1
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    directory = tmp_path / "little"
    directory.mkdir()
    (directory / "recipe.toml").write_text(RECIPE)
    (directory / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\nCOPY engine /opt/engine\n")
    (directory / "patches").mkdir()
    (directory / "patches/one.diff").write_text("a patch")
    return load_recipe(str(directory))


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeDocker:
    fake = FakeDocker(tmp_path / "docker")
    monkeypatch.setenv("PATH", f"{fake.install()}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return fake


@pytest.fixture
def engine(tmp_path: Path) -> tuple[str, str]:
    commit = publish_commit(tmp_path / "git", "engine", {"run": "#!/bin/sh\n", "src/deep.txt": "deep"})
    return str(tmp_path / "git/_git/engine.git"), commit


@pytest.fixture
def deployment(recipe: Recipe, docker: FakeDocker, engine: tuple[str, str], tmp_path: Path) -> Deployment:
    return make_deployment(recipe, docker, tmp_path, lock_of(recipe, *engine))


def lock_of(recipe: Recipe, repository: str = "somewhere", commit: str = "1" * 40, **changes: str) -> Lock:
    locked = {"base": f"registry.lab/base@{DIGEST}", "engine_repository": repository, "engine_commit": commit}
    return Lock(schema=1, recipe=recipe.name, weights=(), image=LockedImage.model_validate({**locked, **changes}))


def make_deployment(recipe: Recipe, docker: FakeDocker, directory: Path, lock: Lock) -> Deployment:
    settings = Settings.model_validate({"cache_dir": directory / "cache"})
    nodes = [
        make_node(role, settings, host=LocalHost(role), session=session(docker, role)) for role in ("head", "worker")
    ]
    return Deployment(settings, recipe, lock, Cluster(*nodes))


def session(docker: FakeDocker, role: str) -> FakeSession:
    def facts(**asked: Any) -> dict[str, Any]:
        free = docker.read("behaviour").get(f"{role}_free", 10**12)
        return {
            "docker": {page: docker.answer(role, page) for page in asked.get("docker", ())},
            "disks": {root: {"free": free} for root in asked.get("disks", ())},
            "files": dict.fromkeys(asked.get("files", ()), "MemAvailable:   9000000 kB\n"),
        }

    def mkdir(paths: list[str]) -> None:
        for path in paths:
            Path(path).mkdir(parents=True, exist_ok=True)

    return FakeSession({"facts": facts, "hello": {"home": "/nowhere", "cpus": 8}, "mkdir": mkdir})


def plan(deployment: Deployment) -> list[Change]:
    facts = deployment.cluster.on_both(lambda node: image.gather(node, deployment))
    return list(Plan(tuple(image.plan(deployment, facts))).changes)


def tag(deployment: Deployment) -> str:
    return image.tag_of(deployment.recipe, deployment.lock)


def build(deployment: Deployment, work: RecordingWork | None = None) -> str:
    change = plan(deployment)[0]
    assert (change.node, change.step) == ("head", "build")
    return change.action(work or RecordingWork())


def ship(deployment: Deployment, work: RecordingWork | None = None) -> str:
    change = plan(deployment)[-1]
    assert (change.node, change.step) == ("worker", "ship")
    return change.action(work or RecordingWork())


def is_gone(pid_file: Path) -> bool:
    return not Path(f"/proc/{pid_file.read_text()}").exists()


# -- the name ---------------------------------------------------------------------------------------------------------


def test_the_name_is_what_the_image_is_made_of(recipe: Recipe) -> None:
    directory = recipe.directories[0]
    steps: list[Callable[[], Any]] = [
        lambda: (directory / "Dockerfile").write_text("ARG BASE\nFROM ${BASE}\n"),
        lambda: (directory / "patches/one.diff").write_text("another patch"),
        lambda: (directory / "patches/one.diff").chmod(0o755),
        lambda: (directory / "two.txt").write_text("a new file"),
    ]
    seen = [image.tag_of(recipe, lock_of(recipe))]
    for step in steps:
        step()
        seen.append(image.tag_of(recipe, lock_of(recipe)))
    seen.append(image.tag_of(recipe, lock_of(recipe, commit="2" * 40)))
    seen.append(image.tag_of(recipe, lock_of(recipe, base="registry.lab/base@sha256:" + "1" * 64)))
    changed = recipe.model_copy(update={"image": recipe.image.model_copy(update={"build_arguments": {"A": "1"}})})
    seen.append(image.tag_of(changed, lock_of(recipe)))
    assert len(set(seen)) == len(seen)
    assert all(name.startswith("sparkserve/little:") for name in seen)


def test_nothing_else_changes_the_name(recipe: Recipe) -> None:
    directory = recipe.directories[0]
    before = image.tag_of(recipe, lock_of(recipe))
    (directory / "README.md").write_text("text")
    (directory / ".editor").write_text("hidden")
    (directory / "recipe.toml").write_text(RECIPE.replace("little engine", "tiny engine"))
    (directory / "link").symlink_to("/etc/passwd")
    moved = lock_of(recipe, repository="elsewhere", base=f"mirror.lab/base@{DIGEST}")
    assert image.tag_of(recipe, moved) == before
    assert set(image.build_files(recipe)) == {"Dockerfile", "patches/one.diff"}


def test_a_recipe_that_extends_another_replaces_single_build_files(recipe: Recipe, tmp_path: Path) -> None:
    child = tmp_path / "child"
    (child / "patches").mkdir(parents=True)
    (child / "recipe.toml").write_text('extends = "little"\nname = "child"\n')
    (child / "patches/one.diff").write_text("the child's patch")
    files = image.build_files(load_recipe(str(child)))
    assert files["patches/one.diff"].content == b"the child's patch"
    assert files["Dockerfile"] == image.build_files(recipe)["Dockerfile"]


def test_a_finished_image_is_named_by_its_digest(recipe: Recipe) -> None:
    finished = recipe.model_copy(update={"image": recipe.image.model_copy(update={"dockerfile": ""})})
    names = {image.tag_of(finished, lock_of(finished, reference=f"a/b@sha256:{digit * 64}")) for digit in "12"}
    assert len(names) == 2
    assert image.labels_of(finished, lock_of(finished)) == {}


# -- the plan ---------------------------------------------------------------------------------------------------------


def facts_of(labels: dict[str, str], layers: tuple[str, ...] = ("1",), architecture: str = "amd64") -> image.Facts:
    return image.Facts(image.ImageFacts(layers, labels, architecture, 1000), 10**12, "/docker", (1, 41))


ABSENT = image.Facts(None, 10**12, "/docker", (1, 41))


def test_what_is_planned_for_what_is_found(deployment: Deployment) -> None:
    labels = image.labels_of(deployment.recipe, deployment.lock)
    good, other = facts_of(labels), facts_of(labels, ("2",))
    wrong = facts_of({**labels, "sparkserve.context": "another"})
    cases = [
        (ABSENT, ABSENT, ["build", "ship"]),
        (ABSENT, good, ["build", "ship"]),
        (good, ABSENT, ["ship"]),
        (good, other, ["ship"]),
        (good, good, []),
        (wrong, good, ["build", "ship"]),
        (facts_of(labels, architecture="arm64"), good, ["build", "ship"]),
        (facts_of({**labels, "sparkserve.engine.repository": "moved"}), good, []),
    ]
    for head, worker, steps in cases:
        changes = image.plan(deployment, {"head": head, "worker": worker})
        assert [change.step for change in changes] == steps, (head, worker)
        assert {change.lane for change in changes} <= {"image"}
        if "ship" in steps:
            assert changes[-1].needs == (f"head/build/{tag(deployment)}",)


@pytest.mark.parametrize("error", ["missing", "permission", "refused", "timeout"])
def test_no_answer_of_docker_is_not_absence(deployment: Deployment, error: str) -> None:
    broken = FakeSession({"facts": lambda **asked: {"docker": {page: {"error": error} for page in asked["docker"]}}})
    with pytest.raises(SparkserveError, match=DOCKER_PROBLEMS[error][0]) as caught:
        image.gather(make_node("worker", session=broken), deployment)
    assert (caught.value.code, caught.value.node) == ("docker_unreachable", "worker")


# -- building ---------------------------------------------------------------------------------------------------------


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
    assert head[tag(deployment)]["labels"] == image.labels_of(deployment.recipe, deployment.lock)
    (run,) = docker.calls("run")
    assert run[run.index("--network") + 1] == "none"
    assert run[run.index("--entrypoint") + 1] == "/opt/engine/run"
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


@pytest.mark.parametrize("where", ["build", "run"])
def test_an_interrupted_build_ends_docker_and_leaves_no_name(
    deployment: Deployment, docker: FakeDocker, where: str
) -> None:
    docker.behave(hang=where)
    pid_file = docker.directory / f"{where}.pid"

    def interrupt() -> None:
        if pid_file.exists() and pid_file.read_text():
            raise Cancelled

    with pytest.raises(Cancelled):
        build(deployment, RecordingWork(on_check=interrupt))
    wait_for(lambda: is_gone(pid_file), "the docker command has ended")
    assert docker.read("head") == {}
    if where == "run":
        assert docker.calls("rm", "--force"), "the container is taken away too"


# -- pulling ----------------------------------------------------------------------------------------------------------


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


# -- shipping ---------------------------------------------------------------------------------------------------------


def test_an_image_is_shipped_and_proved(deployment: Deployment, docker: FakeDocker) -> None:
    build(deployment)
    work = RecordingWork()
    proof = ship(deployment, work)
    assert proof == "2 layers as on the head, 0.00 GB moved"
    assert work.steps[-1][0] > 8 * len(BLOCK)
    assert all(done <= total for done, total in work.steps)
    assert docker.read("worker")[tag(deployment)]["layers"] == ["sha256:1", "sha256:2"]
    assert docker.calls("save") == [["save", tag(deployment)]]
    assert plan(deployment) == []


def test_one_platform_is_saved_where_docker_can(deployment: Deployment, docker: FakeDocker) -> None:
    build(deployment)
    docker.behave(api="1.48")
    ship(deployment)
    assert docker.calls("save") == [["save", "--platform", "linux/amd64", tag(deployment)]]


def test_equal_layers_are_not_sent_again(deployment: Deployment, docker: FakeDocker) -> None:
    build(deployment)
    change = plan(deployment)[-1]
    docker.write("worker", docker.read("head"))
    assert change.action(RecordingWork()) == "2 layers are there already"
    assert docker.calls("save") == []


@pytest.mark.parametrize(
    ("behaviour", "node", "words"),
    [
        ({"load": "fail", "blocks": 200}, "worker", "could not load"),
        ({"save_code": 1}, "head", "could not give"),
        ({"loaded_layers": ["sha256:1"]}, "worker", "has 1 other layers after loading"),
        ({"worker_free": 100}, "worker", "has 100 bytes free"),
    ],
)
def test_a_ship_that_fails_says_where(
    deployment: Deployment, docker: FakeDocker, behaviour: dict[str, Any], node: str, words: str
) -> None:
    build(deployment)
    docker.behave(**behaviour)
    with pytest.raises(SparkserveError) as caught:
        ship(deployment)
    assert caught.value.node == node
    assert words in caught.value.message
    if behaviour.get("load"):
        assert caught.value.details == "no space left on device"


def test_a_load_that_needs_no_last_bytes_is_fine(deployment: Deployment, docker: FakeDocker) -> None:
    build(deployment)
    docker.behave(load="early", blocks=200)
    assert ship(deployment).startswith("2 layers as on the head")


def test_a_worker_that_refuses_at_once_is_not_waited_for(deployment: Deployment, docker: FakeDocker) -> None:
    build(deployment)
    docker.behave(load="fail", hang="save")
    with pytest.raises(SparkserveError, match="could not load") as caught:
        ship(deployment)
    assert caught.value.details == "no space left on device"
    wait_for(lambda: is_gone(docker.directory / "save.pid"), "docker save has ended")


@pytest.mark.parametrize("where", ["save", "load"])
def test_an_interrupted_ship_ends_both_ends(deployment: Deployment, docker: FakeDocker, where: str) -> None:
    build(deployment)
    docker.behave(hang=where)
    pid_file = docker.directory / f"{where}.pid"

    def interrupt() -> None:
        if pid_file.exists() and pid_file.read_text():
            raise Cancelled

    with pytest.raises(Cancelled):
        ship(deployment, RecordingWork(on_check=interrupt))
    wait_for(lambda: is_gone(pid_file), "the docker command has ended")
    assert docker.read("worker") == {}


def test_the_worker_is_loaded_over_the_cable() -> None:
    target = SshTarget("spark@worker", "10.0.0.2", 22, "spark", (), (), "10.0.0.2")
    settings = Settings.model_validate({"worker": "spark@worker", "worker_link": "192.168.100.11"})
    node = make_node("worker", settings, host=SshHost("worker", target, None))  # type: ignore[arg-type]
    command = load_command(node)
    assert command[0] == "ssh"
    assert "HostName=192.168.100.11" in command
    assert command[-3:] == ["spark@worker", "docker", "load"]
