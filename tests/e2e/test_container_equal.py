"""The `docker run` command that people are shown makes exactly the container that docker-py makes, on a real engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import docker
import pytest

from sparkserve.container import BindMount, ContainerSpec, container_name
from sparkserve.docker_form import create_arguments, docker_run_argv
from sparkserve.docker_program import docker_get, docker_logs
from sparkserve.engine_facts import docker_body, parse_container, parse_top
from tests.lab.pair import Pair

pytestmark = pytest.mark.lab
# What belongs to one container and not to how it was asked for.
VOLATILE = ("Id", "Created", "State", "ResolvConfPath", "HostnamePath", "HostsPath", "LogPath", "GraphDriver")
TALK = 'echo out; echo err >&2; sleep 0.3; head -c 40000 /dev/zero | tr "\\0" x; echo; exec sleep 600'


@pytest.fixture
def spec(shared_pair: Pair) -> Iterator[ContainerSpec]:
    head = shared_pair.head
    shared_pair.reset()
    head.run(["mkdir", "-p", "/home/spark/equal/cache"])
    head.run(["touch", "/home/spark/equal/a, b.txt"])
    yield ContainerSpec(
        name=container_name(0),
        image=shared_pair.lab.registry_reference,
        entrypoint=("/bin/sh", "-c"),
        argv=(TALK, "sh", "--flag", "a b", "--json", '{"x": 1}'),
        env={"PLAIN": "1", "WORDS": "a b=c", "EMPTY": ""},
        mounts=(
            BindMount("/home/spark/equal/a, b.txt", "/model/a.txt"),
            BindMount("/home/spark/equal/cache", "/cache", read_only=False),
        ),
        devices=("/dev/infiniband",),
        capabilities=("IPC_LOCK",),
        ulimits={"memlock": -1, "stack": 67_108_864, "core": 1},
        ipc="private",
        shm_bytes=2_147_483_648,
        gpus=True,
        oom_score_adj=1000,
        pids_limit=512,
        stop_seconds=90,
        labels={"sparkserve.owner": "sparkserve", "sparkserve.rank": "0", "sparkserve.run": "run-1"},
    )
    head.docker("rm", "-f", container_name(0))


@pytest.fixture
def engine(shared_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[docker.APIClient]:
    """The head's Docker engine, for docker-py and for the node program's own functions."""
    address = f"unix://{shared_pair.head.root}/run/docker.sock"
    monkeypatch.setenv("DOCKER_HOST", address)
    with closing(docker.APIClient(base_url=address, version="auto")) as client:
        yield client


def inspected(client: docker.APIClient, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.inspect_container(name)
    for key in VOLATILE:
        del found[key]
    # The order of these means nothing: the command sorts some, docker-py keeps it, the engine reads mounts from a map.
    found["Mounts"].sort(key=lambda mount: mount["Destination"])
    found["Config"]["Env"].sort()
    found["HostConfig"]["Ulimits"].sort(key=lambda limit: limit["Name"])
    found["HostConfig"]["DeviceRequests"] = [without_nothing(item) for item in found["HostConfig"]["DeviceRequests"]]
    del found["NetworkSettings"]["SandboxID"]
    del found["NetworkSettings"]["SandboxKey"]
    for key in ("EndpointID", "NetworkID"):
        del found["NetworkSettings"]["Networks"]["host"][key]
    kept: dict[str, Any] = without_nothing(found)
    return kept


def without_nothing(value: Any) -> Any:
    """Leave out what is empty: one way says null where the other says []."""
    if not isinstance(value, dict):
        return value
    kept = {key: without_nothing(inner) for key, inner in value.items()}
    return {key: inner for key, inner in kept.items() if inner not in (None, [], {})}


@pytest.mark.parametrize("ipc", ["private", "host"])
def test_both_ways_make_the_same_container(
    shared_pair: Pair, spec: ContainerSpec, engine: docker.APIClient, ipc: str
) -> None:
    spec = replace(spec, ipc=ipc, shm_bytes=spec.shm_bytes if ipc == "private" else 0)
    shared_pair.head.run(docker_run_argv(spec))
    by_command = inspected(engine, spec.name)
    engine.remove_container(spec.name, force=True)
    container, host = create_arguments(spec)
    made = engine.create_container(**container, host_config=engine.create_host_config(**host))
    engine.start(made["Id"])
    by_client = inspected(engine, spec.name)
    assert by_client == by_command
    assert by_client["HostConfig"]["Privileged"] is False
    assert "no-new-privileges" in by_client["HostConfig"]["SecurityOpt"]


def test_facts_and_logs_of_a_real_container(shared_pair: Pair, spec: ContainerSpec, engine: docker.APIClient) -> None:
    shared_pair.head.run(docker_run_argv(spec))
    deadline = time.monotonic() + 60
    while len(docker_logs({"container": spec.name})["lines"]) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    answer = docker_logs({"container": spec.name})
    texts = sorted(text for _, text in answer["lines"])
    assert texts == ["err", "out", "x" * 40_000]
    since = f"{time.time() - 3600:.6f}"
    assert len(docker_logs({"container": spec.name, "since": since})["lines"]) == 3
    assert docker_logs({"container": spec.name, "since": f"{time.time() + 60:.6f}"})["lines"] == []
    # The engine counts the parts of a long line: a tail may begin inside of it.
    (last,) = docker_logs({"container": spec.name, "tail": "1"})["lines"]
    assert set(last[1]) == {"x"}

    top = docker_get(f"/containers/{spec.name}/top?ps_args=-eo%20pid,stat,args")
    facts = parse_container(
        docker_body(docker_get(f"/containers/{spec.name}/json"), "head"), parse_top(docker_body(top, "head"))
    )
    assert (facts.rank, facts.run, facts.stop_seconds, facts.is_alive) == (0, "run-1", 90, True)
    assert len(facts.processes) == 2
    engine.kill(spec.name, "SIGKILL")
    gone = parse_container(docker_body(docker_get(f"/containers/{spec.name}/json"), "head"))
    assert (gone.is_running, gone.describe()) == (False, "exited (exit code 137 (killed))")
    assert docker_logs({"container": "no-such"})["status"] == 404
