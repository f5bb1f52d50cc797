"""Shipping an engine image with a scripted `docker`: whole, without what is there, and not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkserve.cluster import Deployment
from sparkserve.errors import SparkserveError
from sparkserve.image_ship import saved_names
from sparkserve.plan import Cancelled
from sparkserve.settings import Settings
from sparkserve.ssh import SshTarget
from sparkserve.ssh_host import SshHost
from tests.component.fake_docker import BLOCK, FakeDocker
from tests.component.image.stage import build, interrupted_when, is_gone, plan, ship, tag
from tests.fakes import RecordingWork, make_node
from tests.unit.cases import wait_for


def test_an_image_is_shipped_and_proved(deployment: Deployment, docker: FakeDocker) -> None:
    build(deployment)
    work = RecordingWork()
    proof = ship(deployment, work)
    assert proof == "2 layers as on the head, 1.1 MB moved"
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


@pytest.fixture
def half_there(deployment: Deployment, docker: FakeDocker) -> Deployment:
    """The image is on the head, and the worker has an older one with the same base."""
    build(deployment)
    older = {"layers": ["sha256:1", "sha256:old"], "labels": {}, "architecture": "amd64", "size": 10}
    docker.write("worker", {"sparkserve/little:older": older})
    return deployment


def test_only_missing_layers_are_sent(half_there: Deployment, docker: FakeDocker) -> None:
    docker.behave(worker_free=1_000_000)  # twice what is missing, not twice the image
    assert plan(half_there)[-1].size == 500_000
    work = RecordingWork()
    assert ship(half_there, work) == "2 layers as on the head, 0.5 MB moved"
    assert "the worker has 1 of 2 layers" in work.notes
    assert len(docker.calls("save")) == len(docker.calls("load")) == 1
    assert docker.read("worker")[tag(half_there)]["layers"] == ["sha256:1", "sha256:2"]


def test_a_layer_that_goes_while_the_rest_is_sent(half_there: Deployment, docker: FakeDocker) -> None:
    work = RecordingWork(on_check=lambda: docker.write("worker", {}) if len(docker.calls("load")) < 1 else None)
    assert ship(half_there, work) == "2 layers as on the head, 1.1 MB moved"
    assert work.notes[-1] == "the worker cannot load these layers alone: sending the whole image"
    assert len(docker.calls("load")) == 2
    assert plan(half_there) == []


@pytest.mark.parametrize("role", ["head", "worker"])
def test_a_store_of_whole_images_gives_and_gets_one(half_there: Deployment, docker: FakeDocker, role: str) -> None:
    docker.behave(**{f"{role}_driver": [["driver-type", "io.containerd.snapshotter.v1"]]})
    assert plan(half_there)[-1].before == "absent"
    assert ship(half_there) == "2 layers as on the head, 1.1 MB moved"
    assert len(docker.calls("load")) == 1


def test_the_names_of_saved_layers_are_those_of_docker() -> None:
    """Layers of an image of the lab, and what Docker 20.10 made of them in its archive."""
    layers = (
        "sha256:fa8e14fb701672247341bd2b72655ea27c5196f283cbabe17f57541cb088cea0",
        "sha256:7b4c5859649824427ff83d512748a66ee18b86e174b62608d41efc2049c4845b",
        "sha256:079d76664cb413550ecd3195e4970e17952e0d646b550f322a7f3aa616cc351f",
    )
    older = [name for name in saved_names(layers) if name.endswith("/layer.tar")]
    assert older == [
        "7532c19f4651857bd4a317c527541b8e2f5f52f1a17bff3ee4817b06fcc9ad4f/layer.tar",
        "8c9b19d8ffad3456cdd9bcaf00341e950211a112286182397d7ff2d379842eee/layer.tar",
        "47566a34befa90b501cae4a10428fbc577c7839e3de93baf35daaafaae8f3acc/layer.tar",
    ]
    assert list(saved_names(layers))[::2] == [layer.replace("sha256:", "blobs/sha256/") for layer in layers]


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
        ({"worker_free": 100}, "worker", "has 100 bytes free; needed to load the image: 2,000,000"),
        ({"head_free": 100}, "head", "has 100 bytes free; needed to give the image out: 1,000,000"),
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

    with pytest.raises(Cancelled):
        ship(deployment, interrupted_when(pid_file))
    wait_for(lambda: is_gone(pid_file), "the docker command has ended")
    assert docker.read("worker") == {}


def test_an_interrupt_ends_the_program_between_and_what_it_began(half_there: Deployment, docker: FakeDocker) -> None:
    docker.behave(hang="save")
    before, pid_file = docker.read("worker"), docker.directory / "save.pid"

    with pytest.raises(Cancelled):
        ship(half_there, interrupted_when(pid_file))
    wait_for(lambda: is_gone(pid_file), "docker save has ended")
    assert docker.read("worker") == before


def test_the_worker_is_loaded_over_the_cable() -> None:
    target = SshTarget("spark@worker", "10.0.0.2", 22, "spark", (), (), "10.0.0.2")
    settings = Settings.model_validate({"worker": "spark@worker", "worker_link": "192.168.100.11"})
    node = make_node("worker", settings, host=SshHost("worker", target, None, Path()))  # type: ignore[arg-type]
    command = node.host.bulk_argv(["docker", "load"], node.link_address)
    assert command[0] == "ssh"
    assert "HostName=192.168.100.11" in command
    assert command[-2:] == ["spark@worker", "docker load"]
