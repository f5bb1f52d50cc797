from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sparkserve import tuning
from sparkserve.cluster import Cluster, Deployment, Role
from sparkserve.errors import SparkserveError
from sparkserve.hosts import sudo_needs_password
from sparkserve.plan import Change
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from tests.fakes import FakeHost, FakeSession, RecordingWork, make_node
from tests.unit.test_lock import changed
from tests.unit.test_recipe import make_recipe

WANTED = {"vm.swappiness": "0", "vm.dirty_ratio": "5"}


@dataclass
class Machine:
    """A kernel's values and a few files, changed by the commands that tuning runs as root."""

    values: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)
    stubborn: bool = False
    asks: bool = False

    def facts(self, files: list[str], **_: Any) -> dict[str, Any]:
        sysctls = {"/proc/sys/" + name.replace(".", "/"): f"{value}\n" for name, value in self.values.items()}
        known = {**sysctls, **self.files}
        return {"files": {path: known.get(path) for path in files}}


class RootHost(FakeHost):
    """Does what tuning asks root for, and nothing else."""

    def __init__(self, name: str, machine: Machine) -> None:
        super().__init__(name)
        self._machine = machine

    def sudo(self, argv: Any, *, stdin: bytes = b"", timeout: float = 60.0) -> Any:
        if self._machine.asks:
            raise sudo_needs_password(self.name)
        match list(argv):
            case ["mkdir", "-p", tuning.JOURNAL_DIR]:
                pass
            case ["tee", path]:
                self._machine.files[path] = stdin.decode()
            case ["mv", "-f", source, target]:
                self._machine.files[target] = self._machine.files.pop(source)
            case ["sysctl", "-q", "-w", *pairs]:
                if not self._machine.stubborn:
                    self._machine.values.update(pair.split("=", 1) for pair in pairs)
            case ["true"]:
                pass
            case ["rm", "-f", *paths]:
                for path in paths:
                    self._machine.files.pop(path, None)
            case other:
                raise AssertionError(other)


class Pair:
    """Two such machines and the deployment over them."""

    def __init__(self, directory: Path, head: Machine, worker: Machine) -> None:
        self.machines: dict[Role, Machine] = {"head": head, "worker": worker}
        nodes = [
            make_node(role, host=RootHost(role, machine), session=FakeSession({"facts": machine.facts}))
            for role, machine in self.machines.items()
        ]
        self.cluster = Cluster(*nodes)
        toml = "[tuning.sysctl]\n" + "".join(f'"{name}" = "{value}"\n' for name, value in WANTED.items())
        recipe = load_recipe(str(make_recipe(directory / "recipe", toml)))
        self.deployment = Deployment(Settings(), recipe, changed({}), self.cluster)

    def plan(self) -> list[Change]:
        facts = self.cluster.on_both(lambda node: tuning.gather(node, WANTED))
        return tuning.plan(self.deployment, facts)

    def apply(self) -> list[str]:
        return [change.action(RecordingWork()) for change in self.plan()]


def machine(swappiness: str = "60") -> Machine:
    return Machine({"vm.swappiness": swappiness, "vm.dirty_ratio": "20"})


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path, machine(), machine("0"))


def test_the_file_is_what_keeps_the_values() -> None:
    assert tuning.file_text({"b.c": "1", "a": "0"}) == (
        "# written by sparkserve; `sparkserve tune --undo` removes it\na = 0\nb.c = 1\n"
    )


def test_plan_apply_and_no_changes(pair: Pair) -> None:
    changes = pair.plan()
    assert [(change.node, change.before) for change in changes] == [
        ("head", "vm.dirty_ratio=20, vm.swappiness=60, not kept over a reboot"),
        ("worker", "vm.dirty_ratio=20, vm.swappiness=0, not kept over a reboot"),
    ]
    assert {change.after for change in changes} == {"vm.dirty_ratio=5, vm.swappiness=0"}
    assert pair.apply() == [changes[0].after, changes[1].after]
    assert pair.plan() == []


def test_a_value_that_is_zero_already_is_no_change(pair: Pair) -> None:
    pair.machines["worker"].values["vm.dirty_ratio"] = "5"
    pair.machines["worker"].files[tuning.SYSCTL_FILE] = tuning.file_text(WANTED)
    assert [change.node for change in pair.plan()] == ["head"]


def test_a_file_that_says_something_else_is_a_change(pair: Pair) -> None:
    pair.apply()
    pair.machines["head"].files[tuning.SYSCTL_FILE] += "vm.swappiness = 10\n"
    assert [change.node for change in pair.plan()] == ["head"]


def test_the_journal_keeps_the_first_values(pair: Pair) -> None:
    pair.apply()
    head = pair.machines["head"]
    first = json.loads(head.files[tuning.JOURNAL])
    head.values["vm.swappiness"] = "33"
    pair.apply()
    again = json.loads(head.files[tuning.JOURNAL])
    assert first["before"]["vm.swappiness"] == again["before"]["vm.swappiness"] == "60"
    assert first["since"] == again["since"]


def test_undo_puts_the_first_values_back(pair: Pair) -> None:
    pair.apply()
    told = tuning.undo(pair.cluster)
    assert told["head"] == "vm.dirty_ratio=20, vm.swappiness=60"
    assert pair.machines["head"].values["vm.swappiness"] == "60"
    assert pair.machines["worker"].values["vm.swappiness"] == "0"
    assert [found.files for found in pair.machines.values()] == [{}, {}]
    assert set(tuning.undo(pair.cluster).values()) == {"nothing to put back"}


def test_nothing_is_undone_where_one_node_wants_a_password(pair: Pair) -> None:
    pair.apply()
    pair.machines["head"].asks = True
    tuned = [(dict(found.values), dict(found.files)) for found in pair.machines.values()]
    with pytest.raises(SparkserveError) as caught:
        tuning.undo(pair.cluster)
    assert (caught.value.code, caught.value.node) == ("sudo_password", "head")
    assert "`sparkserve tune --undo`" in caught.value.hint
    assert [(found.values, found.files) for found in pair.machines.values()] == tuned


def test_a_node_without_anything_to_undo_needs_no_password(pair: Pair) -> None:
    pair.apply()
    pair.machines["worker"].files.clear()
    pair.machines["worker"].asks = True
    assert tuning.undo(pair.cluster)["worker"] == "nothing to put back"


def test_undo_of_a_file_alone(pair: Pair) -> None:
    pair.machines["head"].files[tuning.SYSCTL_FILE] = "x"
    assert tuning.undo(pair.cluster)["head"] == f"{tuning.SYSCTL_FILE} removed"


def test_values_that_do_not_stay_are_a_failure(pair: Pair) -> None:
    pair.machines["head"].stubborn = True
    with pytest.raises(SparkserveError, match=r"vm\.swappiness=60") as caught:
        pair.apply()
    assert (caught.value.code, caught.value.node) == ("tuning_failed", "head")


def test_a_kernel_without_that_name(pair: Pair) -> None:
    del pair.machines["worker"].values["vm.swappiness"]
    with pytest.raises(SparkserveError, match=r"no vm\.swappiness") as caught:
        pair.plan()
    assert (caught.value.code, caught.value.node) == ("sysctl_unknown", "worker")


@pytest.mark.parametrize("text", ["{", "[]", "5", '{"before": 5}'])
def test_a_broken_journal_is_told_and_not_written_over(pair: Pair, text: str) -> None:
    pair.machines["head"].files[tuning.JOURNAL] = text
    with pytest.raises(SparkserveError, match="is broken") as caught:
        pair.plan()
    assert (caught.value.code, caught.value.node) == ("tuning_journal", "head")
    assert pair.machines["head"].files[tuning.JOURNAL] == text
