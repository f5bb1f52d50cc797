from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sparkserve.container import ContainerSpec, LinkPlace, build_spec, check_resolved
from sparkserve.docker_form import create_arguments, docker_run_argv
from sparkserve.errors import EXIT_NOT_READY, EXIT_USAGE, SparkserveError, flatten
from sparkserve.recipe import Recipe
from sparkserve.recipe_source import load_recipe
from tests.unit.deployments import FILES, IMAGE, LINKS, TEMPLATE, make_deployment

GOLDEN = Path(__file__).parent.parent / "golden" / "container"


def build(rank: int, changes: dict[str, Any] | None = None, recipe: Recipe | None = None) -> ContainerSpec:
    return build_spec(make_deployment(changes, recipe=recipe), rank, LINKS, FILES, IMAGE)


def changed_recipe(**tables: dict[str, Any]) -> Recipe:
    recipe = load_recipe("tensorfold-1017")
    parts = {name: getattr(recipe, name).model_copy(update=update) for name, update in tables.items()}
    return recipe.model_copy(update=parts)


@pytest.mark.parametrize("rank", [0, 1])
def test_docker_command_is_the_golden_one(rank: int) -> None:
    lines = "\n".join(docker_run_argv(build(rank).of_run("20260101T000000-abcd"))) + "\n"
    assert lines == (GOLDEN / f"rank{rank}.txt").read_text()


def test_ranks_differ_only_in_what_is_their_own() -> None:
    head, worker = build(0), build(1)
    shared = [name for name in head.env if head.env[name] == worker.env[name]]
    assert {*head.env} == {*worker.env}
    assert {*head.env} - {*shared} == {
        "TF_RDMA_DEVICES",
        "NCCL_IB_HCA",
        "NCCL_IB_GID_INDEX",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
    }
    for flag in ("--context", "--parallel", "--mtp-drafts", "--master", "--master-port", "--tp"):
        assert [spec.argv[spec.argv.index(flag) + 1] for spec in (head, worker)] == [
            head.argv[head.argv.index(flag) + 1]
        ] * 2
    assert "--host" in head.argv
    assert "--host" not in worker.argv


def test_container_is_never_privileged_and_keeps_the_network_of_the_host() -> None:
    argv, (_, host) = docker_run_argv(build(0)), create_arguments(build(0))
    assert "--network=host" in argv
    assert "--security-opt=no-new-privileges" in argv
    assert not [word for word in argv if "privileged" in word and "no-new" not in word]
    assert host["network_mode"] == "host"
    assert host["security_opt"] == ["no-new-privileges"]
    assert host["restart_policy"]["Name"] == "no"
    assert "privileged" not in host


def test_everything_but_the_cache_is_read_only() -> None:
    for spec in (build(0), build(1)):
        writable = {mount.target for mount in spec.mounts if not mount.read_only}
        assert writable == {"/cache/ranks", "/cache/maps", "/cache/code"}
        assert {mount.target for mount in spec.mounts if mount.read_only} >= {
            "/model/config.json",
            "/engram/model-00047-of-00048.safetensors",
            "/model/chat_template.jinja",
        }


def test_digest_stays_when_only_the_gid_index_moved() -> None:
    moved = {**LINKS, "head": replace(LINKS["head"], gid_index=9)}
    before, after = build(0), build_spec(make_deployment(), 0, moved, FILES, IMAGE)
    assert before.env["NCCL_IB_GID_INDEX"] == "3"
    assert after.env["NCCL_IB_GID_INDEX"] == "9"
    assert before.digest == after.digest
    assert before.digest == before.of_run("another").digest


@pytest.mark.parametrize(
    ("changes", "image", "template"),
    [
        ({"context": 4096}, IMAGE, TEMPLATE),
        ({"thinking": True}, IMAGE, TEMPLATE),
        ({"extra_args": "--vision"}, IMAGE, TEMPLATE),
        ({"cache_dir": "/other"}, IMAGE, TEMPLATE),
        ({}, "sparkserve/tensorfold-1017:ffffffffffff", TEMPLATE),
        ({}, IMAGE, "/other.jinja"),
    ],
)
def test_digest_moves_with_everything_else(changes: dict[str, Any], image: str, template: str) -> None:
    files = {"/model/chat_template.jinja": template}
    assert build_spec(make_deployment(changes), 1, LINKS, files, image).digest != build(1).digest


def test_settings_override_the_recipe_on_both_ranks() -> None:
    changes = {
        "context": 4096,
        "requests": 2,
        "drafts": 0,
        "thinking": True,
        "extra_args": "--vision --kv-dtype 'fp 8'",
    }
    for rank in (0, 1):
        argv = build(rank, changes).argv
        assert argv[argv.index("--context") + 1] == "4096"
        assert argv[argv.index("--parallel") + 1] == "2"
        assert "--no-drafts" in argv
        assert "--mtp-drafts" not in argv
        assert "--thinking" in argv
        assert argv[-3:] == ("--vision", "--kv-dtype", "fp 8")


@pytest.mark.parametrize(
    ("changes", "codes", "words"),
    [
        ({"context": 2_000_000}, ["parameter_limit"], "SPARKSERVE_CONTEXT is 2,000,000"),
        ({"drafts": 6, "context": 2_000_000}, ["parameter_limit", "parameter_limit"], "at most 5 draft"),
        ({"extra_args": "--context=5"}, ["extra_args_owned"], "--context=5 sets --context"),
        ({"extra_args": "--par 9"}, ["extra_args_owned"], "--par sets --parallel"),
        ({"extra_args": "--no_thinking"}, ["extra_args_owned"], "--no_thinking sets --no-thinking"),
        ({"extra_args": "--thinking --port=1"}, ["extra_args_owned"] * 2, "--port=1 sets --port"),
        ({"api_host": "0.0.0.0"}, ["api_open"], "without a key"),
        ({"api_port": 29551}, ["ports_equal"], "29551"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], codes: list[str], words: str) -> None:
    with pytest.raises(SparkserveError) as caught:
        build(1, changes)
    assert [error.code for error in flatten(caught.value)] == codes
    assert words in " ".join(error.message for error in flatten(caught.value))
    assert caught.value.exit_code == EXIT_USAGE


def test_parameter_that_the_recipe_does_not_have() -> None:
    with pytest.raises(SparkserveError, match="has no such value") as caught:
        build(0, {"drafts": 1}, changed_recipe(parameters={"drafts": None}))
    assert caught.value.code == "parameter_unknown"


def test_api_key_is_a_file_of_rank_0_and_in_no_text() -> None:
    changes = {"api_key_file": "/home/spark/keys", "api_host": "0.0.0.0"}
    head, worker = build(0, changes), build(1, changes)
    assert head.argv[-2:] == ("--api-key-file", "/run/sparkserve/api-keys")
    key = next(mount for mount in head.mounts if mount.target == "/run/sparkserve/api-keys")
    assert (key.source, key.read_only) == ("/home/spark/keys", True)
    assert "api-key" not in repr(worker)
    with pytest.raises(SparkserveError) as caught:
        build(0, changes, changed_recipe(launch={"api_key_mount": ""}))
    assert caught.value.code == "api_key_unsupported"


def test_both_ranks_get_as_many_devices_where_one_half_of_a_cable_is_not_usable() -> None:
    half = LinkPlace("10.100.8.2", "enp1s0f0np0", ("rocep1s0f0",), 5)
    for rank, device in ((0, "rocep1s0f1"), (1, "rocep1s0f0")):
        spec = build_spec(make_deployment(), rank, {"head": LINKS["head"], "worker": half}, FILES, IMAGE)
        assert spec.env["TF_RDMA_DEVICES"] == device


def test_unknown_facts_are_named_places_and_cannot_be_started() -> None:
    unknown = LinkPlace()
    spec = build_spec(make_deployment(), 1, {"head": LINKS["head"], "worker": unknown}, FILES, IMAGE)
    assert spec.env["NCCL_SOCKET_IFNAME"] == "<worker.link.interface>"
    assert spec.env["NCCL_IB_HCA"] == "=<worker.link.hcas>"
    assert spec.unresolved == ("worker.link.gid_index", "worker.link.hcas", "worker.link.interface")
    with pytest.raises(SparkserveError, match=r"worker\.link\.gid_index") as caught:
        check_resolved(spec)
    assert caught.value.exit_code == EXIT_NOT_READY
    check_resolved(build(1))


def test_template_stands_over_one_of_the_weights() -> None:
    deployment = make_deployment()
    model = deployment.lock.weights[0]
    files = (*model.files, model.files[0].model_copy(update={"path": "chat_template.jinja"}))
    lock = deployment.lock.model_copy(update={"weights": (model.model_copy(update={"files": files}),)})
    spec = build_spec(replace(deployment, lock=lock), 0, LINKS, FILES, IMAGE)
    assert [mount.source for mount in spec.mounts if mount.target == "/model/chat_template.jinja"] == [TEMPLATE]


def test_docker_py_is_given_what_the_command_says() -> None:
    spec = build(0)
    container, host = create_arguments(spec)
    argv = docker_run_argv(spec)
    image = argv.index(IMAGE)
    assert container["entrypoint"] + container["command"] == [*spec.entrypoint, *spec.argv]
    assert argv[image + 1 :] == container["command"]
    assert {f"--env={name}={value}" for name, value in container["environment"].items()} <= {*argv}
    assert {f"--label={name}={value}" for name, value in container["labels"].items()} <= {*argv}
    assert len(host["mounts"]) == len([word for word in argv if word.startswith("--mount=")]) == len(spec.mounts)
    assert host["device_requests"] == [{"Count": -1, "Capabilities": [["gpu"]]}]
    assert f"--stop-timeout={container['stop_timeout']}" in argv
    assert asdict(spec)["stop_seconds"] == 90
