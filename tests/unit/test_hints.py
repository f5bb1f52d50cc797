"""Every command of ours that an error, a recipe or a document tells a user to type is one that there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import sparkserve
from sparkserve.cli import app
from sparkserve.errors import with_settings_file

SOURCES = sorted(Path(sparkserve.__file__).parent.glob("*.py"))
ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("templates/**/recipe.toml")),
]
# `sparkserve word … --option`, up to what ends a command in a text.
TOLD = re.compile(r"sparkserve ([a-z][a-z-]+(?: [a-z][a-z-]*)?)((?: --?[a-z][a-z-]*| [A-Z][A-Z_-]+| \{[^}]+\})*)")


def told() -> Iterator[tuple[str, str, str]]:
    for path in SOURCES:
        text = path.read_text()
        for match in re.finditer(
            r"`(sparkserve [^`\n]*)`|\"(sparkserve [^\"\n]*)\"|[:;] (sparkserve [^\"`\n]*)[\"`]", text
        ):
            line = next(filter(None, match.groups()))
            if found := TOLD.match(line):
                yield path.name, found[1], found[2]


def told_in_documents() -> Iterator[tuple[str, str, str]]:
    """List what stands between backticks, and each line of a block to copy."""
    for path in DOCUMENTS:
        outside, blocks = path.read_text().split("```")[::2], path.read_text().split("```")[1::2]
        lines = [line for text in outside for line in re.findall(r"`(sparkserve [^`\n]*)`", text)]
        lines += [line for text in blocks for line in re.findall(r"^\$? ?(sparkserve .*)$", text, re.MULTILINE)]
        for line in lines:
            if found := TOLD.match(line.partition("  ")[0]):
                yield path.name, found[1], found[2]


CASES = sorted({case for case in (*told(), *told_in_documents()) if "{name}" not in case[1]})


def test_there_are_commands_to_check() -> None:
    assert len(CASES) > 10


@pytest.mark.parametrize(("file", "words", "options"), CASES)
def test_a_told_command_is_there(file: str, words: str, options: str) -> None:
    group = typer.main.get_command(app)
    first, *rest = words.split()
    commands = getattr(group, "commands", {})
    assert first in commands, f"{file}: sparkserve {words}"
    command = commands[first]
    if rest and hasattr(command, "commands"):
        assert rest[0] in command.commands, f"{file}: sparkserve {words}"
        command = command.commands[rest[0]]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    assert set(re.findall(r"--[a-z-]+", options)) <= known, f"{file}: sparkserve {words}{options}"


def test_every_error_and_every_known_line_says_what_to_do() -> None:
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 200
    assert [code for code, message, hint in rows if not (message.strip() and hint.strip())] == []


def commands() -> Iterator[str]:
    for name, found in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        yield from (f"{name} {inner}" for inner in found.commands) if hasattr(found, "commands") else (name,)


@pytest.mark.parametrize("name", [*commands()])
def test_every_command_of_a_hint_names_another_settings_file(name: str) -> None:
    told = with_settings_file(f"type `sparkserve {name} --json`", "my pair.env")
    assert told == f"type `sparkserve {name} -e 'my pair.env' --json`"
    assert with_settings_file(told, "my pair.env") == told
    assert with_settings_file(told, ".env") == told


def test_the_settings_file_of_a_text() -> None:
    told = with_settings_file("a bug in sparkserve: write to .env; set HF_TOKEN in .env to it", "b.env")
    assert told == "a bug in sparkserve: write to b.env; set HF_TOKEN in b.env to it"
