from __future__ import annotations

import copy
import json
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkserve.against import Difference, Wanted, compare
from sparkserve.cluster import ROLES, Cluster, Deployment, Role
from sparkserve.container import build_spec, with_secrets
from sparkserve.engine_facts import Process
from sparkserve.errors import SparkserveError
from sparkserve.lifecycle import open_session
from sparkserve.lock import Lock, LockedImage
from sparkserve.output import Mode, Output
from sparkserve.preflight import check_foreign_containers
from sparkserve.recipe import Recipe
from sparkserve.recipe_text import to_toml
from sparkserve.settings import Settings
from sparkserve.takeover import Takeover, find_pair, find_ranks, translate
from sparkserve.takeover_facts import Facts, Running, find_beside, given_beside, parse
from sparkserve.takeover_families import read_families
from sparkserve.takeover_story import _check_equal, _find_running, compare_with_running
from sparkserve.takeover_texts import find_secrets, lay_together, name_apart
from tests.unit.cases import CASES, ROOT, case_files, read_case, read_rows, row_name
from tests.unit.deployments import LINKS, make_pair

GOLDEN = ROOT / "tests" / "golden" / "takeover"
PAIRS = [path for path in case_files("takeover") if "_by_" in path.name]
SERVED = {"ports.api": "8000", "model_name": "served-name"}
FAMILY_TABLES = ("phases", "failures", "readiness", "counters")
Inspected = dict[str, dict[str, Any]]


def read(name: str) -> Inspected:
    found: Inspected = read_case(CASES / "takeover" / f"{name}.json")
    return found


def facts_of(inspected: Inspected) -> dict[Role, Facts]:
    return {role: Facts((running_of(role, inspected[role]),), 90 * 2**30, 10 * 2**30) for role in ROLES}


def running_of(role: Role, found: dict[str, Any]) -> Running:
    running = parse(role, found["container"], found["image"], tuple(found["processes"]))
    return given_beside(running, **found["beside"]) if found.get("beside") else running


def taken(inspected: Inspected) -> Takeover:
    facts = facts_of(inspected)
    return translate(find_pair(facts), facts, LINKS, SERVED)


def recipe_of(found: Takeover) -> Recipe:
    return Recipe.model_validate({**tomllib.loads(to_toml(found.recipe)), "directories": [Path("/recipe")]})


def differences(inspected: Inspected, **changes: dict[str, Any]) -> list[Difference]:
    """Compare what runs with what the recipe that came of it makes, with some of its tables changed."""
    found, facts = taken(inspected), facts_of(inspected)
    recipe = recipe_of(found)
    parts = {name: getattr(recipe, name).model_copy(update=update) for name, update in changes.items()}
    recipe = recipe.model_copy(update=parts)
    lock = Lock(schema=1, recipe=recipe.name, weights=(), image=LockedImage(reference=recipe.image.reference))
    key = {"api_key_file": "/key"} if "api_key" in found.secrets else {}
    settings = Settings.model_validate({**found.settings, **key})
    deployment = Deployment(settings, recipe, lock, make_cluster(settings))
    rows = []
    for rank, role in enumerate(ROLES):
        spec = build_spec(deployment, rank, LINKS, {}, "sparkserve/ours:0123456789ab")
        assert spec.unresolved == ()
        whole = with_secrets(spec, {name: secret(value) for name, value in found.secrets.items()})
        rows += compare(facts[role].running[0], Wanted(whole, lock.image.reference))
    return rows


def secret(value: str) -> Any:
    return Settings.model_validate({"hf_token": value}).hf_token


def make_cluster(settings: Settings) -> Cluster:
    return make_pair(settings)


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_the_recipe_is_the_golden_one(path: Path) -> None:
    found = taken(read_case(path))
    tables = {name: value for name, value in found.recipe.items() if name not in FAMILY_TABLES}
    text = to_toml({**tables, "settings": found.settings, "notes": list(found.notes)})
    golden = GOLDEN / f"{path.stem}.toml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()
    assert recipe_of(found).phases, "the log of the family is known"


def test_lists_that_docker_or_a_launcher_keeps_in_maps_mean_the_same_in_any_order() -> None:
    """Docker tells mounts in another order at each look, and Compose gives it limits in another order at each start."""
    inspected, other = read("tensorfold_by_hand"), read("tensorfold_by_hand")
    for found in other.values():
        found["container"]["Mounts"].reverse()
        found["container"]["HostConfig"]["Ulimits"].reverse()
    assert inspected != other
    assert to_toml(taken(other).recipe) == to_toml(taken(inspected).recipe)
    assert differences(other) == differences(inspected)


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_ours_gets_the_same_arguments_and_environment(path: Path) -> None:
    rows = differences(read_case(path))
    assert [row for row in rows if row.what != "option"] == []
    assert [row for row in rows if not row.reason] == []
    assert "security_opt" in {row.name for row in rows}


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_secrets_and_facts_of_a_node_stay_where_they_belong(path: Path) -> None:
    found = taken(read_case(path))
    text = to_toml(found.recipe)
    for hidden in (
        "scrubbed",
        *(link.address for link in LINKS.values()),
        *(link.interface for link in LINKS.values()),
    ):
        assert hidden not in text


def test_what_they_are_privileged_for_is_given_by_name() -> None:
    rows = {row.name: row for row in differences(read("vllm_by_hand")) if row.node == "head"}
    assert rows["devices"].ours == "['/dev/infiniband']"
    assert "never privileged" in rows["devices"].reason
    assert rows["privileged"].reason == rows["capabilities"].reason == rows["devices"].reason
    assert "service install" in rows["restart_policy"].reason


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"launch": {"head_argv": ("--host", "0.0.0.0")}}, ("argv", "word")),
        ({"launch": {"env": {}}}, ("env", "NCCL_SOCKET_IFNAME")),
        ({"container": {"mounts": ()}}, ("mount", "/models")),
        ({"container": {"gpus": False}}, ("option", "gpus")),
        ({"container": {"devices": ()}}, ("option", "devices")),
        ({"image": {"entrypoint": ("python3", "-u")}}, ("argv", "word 2")),
    ],
)
def test_a_difference_is_unexplained(changes: dict[str, Any], what: tuple[str, str]) -> None:
    rows = [row for row in differences(read("sglang_by_hand"), **changes) if not row.reason]
    assert any(row.what == what[0] and row.name.startswith(what[1]) for row in rows)


def test_another_image_is_a_difference() -> None:
    inspected = read("tensorfold_by_hand")
    running = facts_of(inspected)["head"].running[0]
    recipe = recipe_of(taken(inspected))
    lock = Lock(schema=1, recipe=recipe.name, weights=(), image=LockedImage(reference=f"other@sha256:{'0' * 64}"))
    spec = build_spec(Deployment(Settings(), recipe, lock, make_cluster(Settings())), 0, LINKS, {}, "x:y")
    assert [row.what for row in compare(running, Wanted(spec, lock.image.reference)) if not row.reason] == ["image"]
    same = Wanted(spec, lock.image.reference, running.image_id)
    assert [row for row in compare(running, same) if not row.reason] == []


def test_an_image_with_a_digest_is_named_by_it() -> None:
    inspected = read("vllm_by_hand")
    digest = f"vllm/vllm-openai@sha256:{'a' * 64}"
    inspected["head"]["image"]["RepoDigests"] = [digest]
    assert taken(inspected).recipe["image"]["reference"] == digest


def change(inspected: Inspected, edits: dict[str, Any]) -> Inspected:
    """Set values by paths such as `head.container.HostConfig.NetworkMode`, `both.…`; `swap.` exchanges the nodes."""
    changed = copy.deepcopy(inspected)
    if edits.get("swap."):
        changed = {"head": changed["worker"], "worker": changed["head"]}
    for path, value in edits.items():
        node, *parents, last = path.split(".")
        for role in {"both": ROLES, "swap": ()}.get(node, (node,)):
            place: Any = changed[role]
            for key in parents:
                place = place[key]
            place[last] = value
    return changed


@pytest.mark.parametrize("case", read_rows("takeover", "refused"), ids=row_name)
def test_what_cannot_be_taken_over_is_refused_by_name(case: dict[str, Any]) -> None:
    with pytest.raises(SparkserveError) as caught:
        taken(change(read(case["of"]), case["edits"]))
    assert caught.value.code == case["code"]
    assert case["words"] in f"{caught.value}\n{caught.value.details}"
    assert case.get("hint", "") in caught.value.hint
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("case", read_rows("takeover", "forms"), ids=row_name)
def test_what_is_taken_is_equal_and_the_rest_is_told(case: dict[str, Any]) -> None:
    inspected = change(read(case["of"]), case["edits"])
    found = taken(inspected)
    rows = differences(inspected)
    assert sorted(f"{row.node} {row.name}" for row in rows if not row.reason) == case["unexplained"]
    assert len(found.recipe["container"]["mounts"]) == case.get("mounts", len(found.recipe["container"]["mounts"]))
    assert case.get("note", "") in "\n".join(found.notes)
    assert "pa${ss" not in to_toml(found.recipe)


def test_a_pair_that_ours_would_not_equal_is_refused_before_anything_is_written() -> None:
    inspected = change(read("vllm_by_hand"), {"both.container.HostConfig.CapDrop": ["ALL"]})
    found, pair = taken(inspected), find_pair(facts_of(inspected))
    recipe = recipe_of(found)
    lock = Lock(schema=1, recipe=recipe.name, weights=(), image=LockedImage(reference=recipe.image.reference))
    settings = Settings.model_validate({**found.settings, "api_key_file": "/key"})
    deployment = Deployment(settings, recipe, lock, make_cluster(settings))
    with pytest.raises(SparkserveError) as caught:
        _check_equal(deployment, LINKS, pair, found.secrets)
    assert (caught.value.code, caught.value.exit_code) == ("takeover_unequal", 3)
    assert caught.value.message == "no recipe can say all that runs: option CapDrop"
    assert "worker: option CapDrop: ['ALL']" in caught.value.details


def test_the_engine_beside_a_sleeper_is_the_one_that_no_shell_wraps() -> None:
    lines = ["bash -c sleep", "sh -c exec vllm serve", "sleep infinity", "python3 /usr/bin/vllm serve m", "vllm again"]
    found = find_beside([Process(pid, "S", line) for pid, line in enumerate(lines)])
    assert found is not None
    assert found.pid == 3
    assert find_beside([Process(1, "S", "nginx")]) is None


def test_a_pair_is_not_compared_without_a_lock_or_a_pair(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("SPARKSERVE_WORKER=spark@192.168.1.22\n")
    session = open_session("plan", env_file, {}, {}, Output(Mode.JSON))
    with pytest.raises(SparkserveError) as caught:
        compare_with_running(session)
    assert (caught.value.code, caught.value.hint) == ("lock_missing", "sparkserve lock")
    with pytest.raises(SparkserveError) as caught:
        _find_running({role: Facts((), 0, 0) for role in ROLES})
    assert (caught.value.code, caught.value.hint) == ("takeover_none", "sparkserve start")


@pytest.mark.parametrize(("left", "missing"), [("head", "worker"), ("worker", "head")])
def test_half_a_pair_is_named_with_what_is_missing(left: Role, missing: Role) -> None:
    facts = facts_of(read("vllm_by_hand"))
    facts[missing] = replace(facts[missing], running=())
    rank, gone = ROLES.index(left), ROLES.index(missing)
    hint = f"rank {gone} is missing on the {missing}: start your own script there, too"
    for look in (find_pair, _find_running):
        with pytest.raises(SparkserveError) as caught:
            look(facts)
        assert (caught.value.code, caught.value.exit_code, caught.value.hint) == ("takeover_half", 3, hint)
        assert caught.value.message == f"only half of a pair runs: vllm-{left} (rank {rank} of vllm) on the {left}"
    (check,) = check_foreign_containers(facts)
    assert (check.node, check.verdict, check.observed) == (
        left, "fail", f"vllm-{left} runs rank {rank} of vllm, and is not ours"
    )  # fmt: skip
    assert check.hint.startswith(f"docker stop vllm-{left}, or your own script's stop; to take it over: {hint}; then ")
    (unknown,) = check_foreign_containers({left: facts[left]})
    assert "missing" not in unknown.hint, "of a node that could not be looked at nothing is known"


BRIDGED = {"NetworkMode": "bridge", "Privileged": False, "DeviceRequests": None, "Devices": None, "Runtime": "runc"}
RDMA = [{"PathOnHost": "/dev/infiniband/uverbs0", "PathInContainer": "/dev/infiniband/uverbs0"}]
SOUND = [{"PathOnHost": "/dev/snd", "PathInContainer": "/dev/snd"}]


@pytest.mark.parametrize(
    ("host", "env", "told"),
    [
        ({}, [], ""),
        ({"Devices": SOUND}, [], ""),
        ({"DeviceRequests": [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]}, [], "the GPU"),
        ({"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]}, [], "the GPU"),
        ({"Runtime": "nvidia"}, ["NVIDIA_VISIBLE_DEVICES=all"], "the GPU"),
        ({"Runtime": "nvidia"}, ["NVIDIA_VISIBLE_DEVICES=void"], ""),
        ({"Runtime": "nvidia"}, [], ""),
        ({"Devices": RDMA}, [], "RDMA devices"),
        ({"Devices": RDMA, "DeviceRequests": [{"Driver": ""}]}, [], "the GPU and RDMA devices"),
        ({"Privileged": True}, [], "every device (privileged)"),
        ({"Privileged": True, "NetworkMode": "host"}, [], ""),  # of its network is told from the list of containers
    ],
)
def test_an_idle_container_of_others_with_the_models_devices_is_told(
    host: dict[str, Any], env: list[str], told: str
) -> None:
    found = read("vllm_by_hand")["head"]
    found["container"]["HostConfig"] |= {**BRIDGED, **host}
    found["container"]["Config"] |= {"Cmd": ["sleep", "infinity"], "Entrypoint": None, "Env": env}
    found["processes"] = ["sleep infinity"]
    facts: dict[Role, Facts] = {"head": Facts((running_of("head", found),), 0, 0)}
    checks = check_foreign_containers(facts)
    wanted = f"vllm-head was given {told}"
    assert [(one.id, one.node, one.verdict, one.observed) for one in checks] == (
        [("containers", "head", "warn", wanted)] if told else []
    )
    assert {one.advice for one in checks} <= {"docker stop vllm-head"}
    ours = replace(facts["head"].running[0], is_ours=True)
    assert check_foreign_containers({"head": Facts((ours,), 0, 0)}) == []


def test_a_whole_pair_can_be_taken_over() -> None:
    hints = [check.hint for check in check_foreign_containers(facts_of(read("vllm_by_hand")))]
    assert [hint.rpartition("; ")[2] for hint in hints] == ["`sparkserve init --from-running` writes its recipe"] * 2


def test_two_pairs_with_one_image_are_told_apart_by_where_they_meet() -> None:
    first, second = (facts_of(read("vllm_by_hand")) for _ in range(2))
    for role in ROLES:
        one = second[role].running[0]
        argv = tuple("29777" if word == "29501" else word for word in one.argv)
        second[role] = replace(second[role], running=(replace(one, name=f"other-{role}", argv=argv),))
    both = {role: replace(first[role], running=first[role].running + second[role].running) for role in ROLES}
    with pytest.raises(SparkserveError) as caught:
        find_pair(both)
    assert caught.value.message == (
        "more than one pair runs: vllm-head and vllm-worker; other-head and other-worker"
    )  # fmt: skip
    assert "docker stop other-head" in caught.value.hint
    both["worker"] = replace(both["worker"], running=second["worker"].running)
    assert find_pair(both).head.name == "other-head"


def test_two_pairs_are_one_too_many() -> None:
    facts = {role: replace(found, running=found.running * 2) for role, found in facts_of(read("vllm_by_hand")).items()}
    with pytest.raises(SparkserveError, match="more than one pair"):
        find_pair(facts)


def test_the_rank_may_stand_in_the_environment() -> None:
    running = facts_of(read("tensorfold_by_hand"))["worker"].running[0]
    bare = replace(running, argv=("serve", "/model"), env={"NODE_RANK": "1"})
    assert [rank.rank for rank in find_ranks([bare])] == [1]
    assert find_ranks([replace(bare, env={})]) == []


def test_every_family_tells_rank_and_meeting_place() -> None:
    families = {family.label: set(family.flags.values()) for family in read_families()}
    assert {"vllm", "sglang", "tensorfold"} <= families.keys()
    for templates in families.values():
        text = " ".join(templates)
        assert all(name in text for name in ("${rank}", "${head.link.address}", "${ports.api}", "${model_name}"))


@pytest.mark.parametrize("case", read_rows("takeover", "secrets"), ids=row_name)
def test_secrets_are_found_by_name_and_by_look(case: dict[str, Any]) -> None:
    running = facts_of(read("vllm_by_hand"))["head"].running[0]
    given = (("bash", "-c"), (case["script"],)) if "script" in case else (("vllm",), tuple(case.get("argv", ())))
    running = replace(running, entrypoint=given[0], argv=given[1], env=case.get("env", {}))
    assert find_secrets(running, "vllm") == case["found"]


def test_one_name_for_two_values_is_told_apart() -> None:
    assert name_apart([{"one": "HF_TOKEN"}, {"two": "HF_TOKEN", "one": "HF_TOKEN"}]) == {
        "one": "HF_TOKEN",
        "two": "HF_TOKEN__2",
    }


def test_words_are_laid_side_by_side_until_they_differ() -> None:
    head = ["--a", "0", "${head.link.address}", "x", "0"]
    worker = ["--a", "1", "${worker.link.address}", "y", "1"]
    assert lay_together(head, worker) == (["--a", "${rank}", "${link.address}"], ["x", "0"], ["y", "1"])


def test_texts_survive_being_written() -> None:
    tables = {
        "plain": 'a "quoted" \\ back\x7f\t\nline ünï',
        "numbers": [1, 2.5, True],
        "inner": {"odd key": "x", "list": [{"a": 1, "b": {"c": [""]}}, {"a": 2}], "empty": []},
    }
    assert tomllib.loads(to_toml(tables)) == tables
    assert json.loads(json.dumps(tables)) == tables
