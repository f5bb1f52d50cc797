"""A recipe's tables as the text of a TOML file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any


def to_toml(tables: Mapping[str, Any]) -> str:
    """Write tables, lists and plain values; a table inside of a list of plain values stays on its line."""
    return "\n".join(_lines(tables, "")).lstrip("\n") + "\n"


def _lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    later = {key: value for key, value in table.items() if isinstance(value, Mapping) or _is_list_of_tables(value)}
    for key, value in table.items():
        if key not in later:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in later.items():
        inner = f"{path}{_key(key)}"
        header = f"[{inner}]" if isinstance(value, Mapping) else f"[[{inner}]]"
        for one in [value] if isinstance(value, Mapping) else value:
            yield f"\n{header}"
            yield from _lines(one, f"{inner}.")


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:  # noqa: ANN401 - anything that TOML knows
    if isinstance(value, (list, tuple)):
        words = [_value(item) for item in value]
        line = f"[{', '.join(words)}]"
        return line if len(line) < 100 else "[\n" + "".join(f"  {word},\n" for word in words) + "]"
    # JSON's strings, numbers and words are TOML's, but for one control character that JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
