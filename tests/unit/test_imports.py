from __future__ import annotations

import ast
import fnmatch
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.unit.cases import ROOT

PACKAGE = ROOT / "sparkserve"
MODULES = sorted(PACKAGE.glob("*.py"))
# What is sent to a node answers on its standard output, and finds nothing there but Python.
PROGRAMS = [path for path in MODULES if path.stem.endswith("_program")]
# From the bottom up: each may import those before it only.
CORE = (
    "errors",
    "addresses",
    "settings",
    "manifest",
    "state_file",
    "placeholders",
    "recipe",
    "recipe_source",
    "lock",
    "docker_program",
    "search_program",
    "node_program",
    "sudo_rules",
    "hosts",
    "ssh_host",
    "ssh",
    "ssh_trust",
    "docker_client",
    "cluster",
    "plan",
)
COMMANDS = ("cli", "cli_*", "command_line")
# Stories that are told beside those of lifecycle.
TOLD = ("storage", "operations", "boot", "diagnose", "setup", "api_client", "takeover_story", "doctor", "doctor_repair")
# Who may import what is above the rooms.
ABOVE = {
    "cli": ("__main__", "cli_*"),
    "output": COMMANDS,
    "tables": (*COMMANDS, "*_tables"),
    "bug_report": COMMANDS,
    "lifecycle": (*COMMANDS, *TOLD),
    "summary": ("lifecycle",),
    "storage": COMMANDS,
    "operations": (*COMMANDS, "doctor"),
    "boot": COMMANDS,
    "diagnose": COMMANDS,
    "setup": COMMANDS,
    "api_client": COMMANDS,
    "takeover_story": COMMANDS,
    "planning": ("lifecycle", "attempt", "preflight", "doctor", "doctor_record"),
    "preflight": ("lifecycle", "doctor"),
    "doctor": (*COMMANDS, "doctor_repair", "doctor_tables"),
    "progress": ("output", "*tables"),
}
ROOMS = {
    "system",
    "link",
    "checks",
    "weights",
    "chat_template",
    "image",
    "tuning",
    "adoption",
    "around",
    "prune",
    "engine",
    "verify",
    "sources",
    "status_look",
}
# What joins rooms: the stories themselves, and what can be said before any node is there.
STORIES = {"lifecycle", *TOLD, "attempt", "planning", "preflight", "blueprint", "recipe_check"}
# Rules read the facts of two rooms; tables show sizes as the rules do.
RULES = ("checks", "host_checks", "need_checks", "pair_checks", "source_checks")
ROOM_EXCEPTIONS = {
    *((rules, facts) for rules in RULES for facts in ("checks", "system", "link")),
    ("doctor_tables", "checks"),
    ("tables", "checks"),
    ("recipe_tables", "checks"),
    ("weights_tables", "checks"),
    ("operate_tables", "checks"),
    ("setup_tables", "checks"),
    ("summary", "checks"),
    ("command_line", "checks"),
    ("link_proof", "checks"),
    ("link_proof", "system"),
}
SLOW = {"docker", "paramiko", "httpx", "huggingface_hub", "jinja2"}
FACES = {"typer", "rich"}
MAY_HAVE_FACES = (*COMMANDS, "progress", "*tables", "output")
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "manager", "common", "misc", "base"}


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclass
class Imports:
    """What a module imports: when it is loaded, or when a function runs; what only type checkers see is left out."""

    at_load: set[str] = field(default_factory=set)
    later: set[str] = field(default_factory=set)

    @property
    def own(self) -> set[str]:
        names = {name.split(".")[1] for name in self.at_load | self.later if name.startswith("sparkserve.")}
        return {name for name in names if (PACKAGE / f"{name}.py").exists()}

    def foreign_at_load(self, names: set[str]) -> set[str]:
        return {name.split(".")[0] for name in self.at_load} & names


def names_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if node.level:
            raise AssertionError("a relative import")
        yield node.module or ""
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def walk(node: ast.AST, found: Imports, *, is_later: bool) -> Imports:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        (found.later if is_later else found.at_load).update(names_in(child))
        inside = is_later or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        walk(child, found, is_later=inside)
    return found


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


IMPORTS = {path.stem: walk(parse(path), Imports(), is_later=False) for path in MODULES}
BY_NAME = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)


def test_the_graph_is_seen_and_has_no_circle() -> None:
    assert {"hosts", "recipe", "settings"} <= IMPORTS["cluster"].own
    assert "ssh" in IMPORTS["cluster"].own
    graphlib.TopologicalSorter({name: found.own for name, found in IMPORTS.items()}).prepare()


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_downwards_only(name: str) -> None:
    assert IMPORTS[name].own <= set(CORE[: CORE.index(name)])


@pytest.mark.parametrize("name", sorted(ABOVE))
def test_nothing_below_imports_what_is_above(name: str) -> None:
    importers = {other for other, found in IMPORTS.items() if name in found.own}
    assert {other for other in importers if not matches(other, ABOVE[name])} == set()


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_rooms_do_not_import_each_other(room: str) -> None:
    importers = {other for other, found in IMPORTS.items() if room in found.own}
    assert importers, f"nobody uses {room}: is it still a room?"
    assert {(other, room) for other in importers - STORIES} <= ROOM_EXCEPTIONS


@BY_NAME
def test_what_costs_time_is_imported_where_it_is_needed(path: Path) -> None:
    allowed = {"docker"} if path.stem == "docker_client" else set()
    assert IMPORTS[path.stem].foreign_at_load(SLOW) <= allowed


@BY_NAME
def test_nothing_below_the_command_line_has_a_face(path: Path) -> None:
    found = IMPORTS[path.stem]
    if not matches(path.stem, MAY_HAVE_FACES):
        assert {name.split(".")[0] for name in found.at_load | found.later} & FACES == set()


@BY_NAME
def test_only_the_output_prints(path: Path) -> None:
    printed = [
        node.lineno
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    allowed = {"output": len(printed), "cli": 2}  # the command line prints its version and its help
    assert len(printed) <= allowed.get(path.stem, 0), printed


@BY_NAME
def test_only_programs_that_are_sent_write_to_standard_output(path: Path) -> None:
    if path.stem != "output" and path not in PROGRAMS:
        assert "sys.stdout" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_that_is_sent_needs_the_standard_library_only(path: Path) -> None:
    carried = {"node_program": {"docker_program", "search_program"}, "link_program": {"node_program"}}
    sent_with_it = carried.get(path.stem, set())
    found = {item.split(".")[0] for item in IMPORTS[path.stem].at_load | IMPORTS[path.stem].later}
    assert found - {"sparkserve"} <= sys.stdlib_module_names
    assert IMPORTS[path.stem].own == sent_with_it


@BY_NAME
def test_a_person_can_read_it(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    assert path.stem not in EMPTY_NAMES
    for node in ast.walk(parse(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            size = (node.end_lineno or 0) - node.lineno + 1
            assert size <= 50, f"{node.name} has {size} lines"


def test_help_needs_nothing_that_is_slow() -> None:
    script = "import sys; from sparkserve import cli; cli._run(['--version']); print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert {name.split(".")[0] for name in answer.stdout.split()} & SLOW == set()
