"""Every command that a hint, a recipe or a document tells to type exists, with the options that it is told with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from sparkserve.cli import app

ROOT = Path(__file__).parents[1]
# What follows our name where it is the subject of a sentence and no command.
PROSE = {"turns", "was", "on", "is", "installed", "yet", "never", "puts", "knows", "decides"}
MENTION = re.compile(r"\bsparkserve ((?:[a-z][\w-]*)(?: [^\s`;,|:()\"']+)*)")


def literals(path: Path) -> Iterator[ast.Constant]:
    """List the texts of a module that people see: of docstrings, those that are the help of a command."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = set()
    if not path.name.startswith("cli"):
        bodies = [getattr(node, "body", None) for node in ast.walk(tree)]
        firsts = [body[0] for body in bodies if isinstance(body, list) and body]
        hidden = {id(first.value) for first in firsts if isinstance(first, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in hidden:
            yield node


def texts() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "sparkserve").glob("*.py")):
        for node in literals(path):
            yield f"{path.name}:{node.lineno}", str(node.value)
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("templates/**/*.toml"), ROOT / "env.example"]
    for path in sorted(documents):
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")


def mentions() -> list[tuple[str, list[str]]]:
    found = [(place, match[1].split()) for place, text in texts() for match in MENTION.finditer(text)]
    return [(place, words) for place, words in found if words[0] not in PROSE]


def problem(words: list[str]) -> str:
    """Say what of a command line does not exist; its first words are commands, the rest may be prose."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith(("-", "{")):
        name = rest[0].rstrip(".")
        if name not in command.commands:
            return "" if command.name == "recipes" and name.isupper() else f"no command {name}"
        command = command.commands[rest.pop(0).rstrip(".")]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    wrong = [word for word in rest if word.startswith("--") and word.partition("=")[0].rstrip(".") not in known]
    return f"no option {wrong[0]}" if wrong else ""


def test_there_are_mentions_to_look_at() -> None:
    assert len(mentions()) > 60


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("up --dry-run", ""),
        ("recipes check ./dir", ""),
        ("dctor", "no command dctor"),
        ("recipes make x", "no command make"),
        ("up --dry", "no option --dry"),
    ],
)
def test_a_wrong_name_is_seen(line: str, expected: str) -> None:
    assert problem(line.split()) == expected


def test_what_we_tell_to_type_exists() -> None:
    wrong = [
        f"{place}: sparkserve {' '.join(words)}: {problem(words)}" for place, words in mentions() if problem(words)
    ]
    assert not wrong, "\n".join(wrong)
