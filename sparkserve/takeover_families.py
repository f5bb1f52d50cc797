"""What the shipped recipes know of each engine family: its flags, and how its log and counters read."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkserve.placeholders import PLACEHOLDER
from sparkserve.recipe_source import templates_dir

# What a flag's value can tell of a pair that runs. Everything else in their arguments stays as it is.
_TELLING = ("rank", "head.link.address", "ports.api", "ports.master", "api_host", "model_name", "context", "requests")
_TABLES = ("phases", "failures", "readiness", "counters")


@dataclass(frozen=True)
class Family:
    """One engine family: the value that each flag takes, as a recipe writes it, and the recipe's tables about it."""

    label: str
    flags: Mapping[str, str]
    tables: Mapping[str, Any]

    def is_in(self, words: Iterable[str]) -> bool:
        """Whether one of the words is the engine's program or Python module."""
        return any(re.fullmatch(rf"(.*/)?{re.escape(self.label)}(\.[\w.]+)?", word) for word in words)

    def read(self, words: Sequence[str]) -> dict[str, str]:
        """Read what the flags tell: the rank, ports, names."""
        found: dict[str, str] = {}
        for flag, value in pairs(words):
            if flag in self.flags and (match := _pattern(self.flags[flag]).fullmatch(value)):
                found |= {name.replace("_DOT_", "."): text for name, text in match.groupdict().items()}
        return found


def pairs(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Give each long flag with its value, whether that stands behind `=` or is the next word."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            flag, is_joined, value = word.partition("=")
            yield flag, value if is_joined else after


def _pattern(template: str) -> re.Pattern[str]:
    """Turn a recipe's value into what finds it again, such as `(?P<head_DOT_link…>.+?):(?P<…>.+?)`."""
    parts = PLACEHOLDER.split(template)
    texts = [f"(?P<{part.replace('.', '_DOT_')}>.+?)" if i % 2 else re.escape(part) for i, part in enumerate(parts)]
    return re.compile("".join(texts))


@functools.cache
def read_families() -> tuple[Family, ...]:
    """Read every family that a shipped recipe names; what only others extend comes first."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((templates_dir() / "recipes").glob("*/recipe.toml")):
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if "engine" in table:
            tables.setdefault(table["engine"], []).append(table)
    return tuple(
        Family(label, dict(flag for table in found for flag in _flags(table)), _about(found[0]))
        for label, found in tables.items()
    )


def runs_engine(words: Sequence[str]) -> bool:
    """Whether the words start an engine of a family that is known."""
    return any(family.is_in(words) for family in read_families())


def _flags(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    launch = table.get("launch", {})
    words = [word for name in ("argv", "more_argv", "head_argv", "worker_argv") for word in launch.get(name, ())]
    for flag, value in pairs(words):
        names = PLACEHOLDER.findall(value)
        if names and set(names) <= set(_TELLING):
            yield flag, value


def _about(table: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: table[name] for name in _TABLES if name in table}
    # These files are in our cache directory, which a pair of others does not use.
    readiness = {name: value for name, value in found.get("readiness", {}).items() if name != "warm_files"}
    return {**found, "readiness": readiness}
