"""The text of a `.env`: every setting with what it is, those that are set as lines, the others as comments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from sparkserve.errors import usage_error
from sparkserve.hosts import LocalHost
from sparkserve.settings import Settings, parse_env, variable_name

# What nobody else can know comes first.
FIRST = ("worker", "head_link", "worker_link", "recipe", "models_dir")


def render(heading: Sequence[str], values: Mapping[str, str], examples: Mapping[str, str]) -> str:
    """Write `values` as lines; a setting that has none shows its default, or else its example, as a comment."""
    lines = [f"# {line}" for line in heading]
    for name in (*FIRST, *(name for name in Settings.model_fields if name not in FIRST)):
        field = Settings.model_fields[name]
        shown = values.get(name) or show_default(field) or examples.get(name, "")
        mark = "" if name in values else "# "
        lines += ["", f"# {field.description}.", f"{mark}{variable_name(name)}={quote(shown)}"]
    return "\n".join(lines) + "\n"


def show_default(field: FieldInfo) -> str:
    """Give the default of a setting as `.env` has it; empty where it has none."""
    value = field.get_default(call_default_factory=True)  # type: ignore[call-arg,unused-ignore]
    return "" if value in (None, "", ()) or isinstance(value, SecretStr) else str(value)


def quote(value: str) -> str:
    """Put quotes around a value only where the line would else say something different."""
    for text in (value, '"' + re.sub(r'([\\"$`])', r"\\\1", value) + '"'):
        found, errors = parse_env(f"NAME={text}")
        if found == {"NAME": value} and not errors:
            return text
    raise usage_error("settings_unwritable", f"{value!r} cannot be written as one line", "choose another name")


def put(text: str, name: str, value: str) -> str:
    """Set one setting in the text of a `.env`: in place of its line or its comment, else at the end."""
    variable = variable_name(name)
    line = f"{variable}={quote(value)}"
    own = re.compile(rf"^(?:export\s+)?{variable}=.*$", re.MULTILINE)
    comment = re.compile(rf"^#\s*{variable}=.*$", re.MULTILINE)
    for pattern in (own, comment):
        if pattern.search(text):
            return pattern.sub(lambda _: line, text, count=1)
    return text + ("" if text.endswith("\n") or not text else "\n") + line + "\n"


def set_line(path: Path, name: str, value: str) -> None:
    """Set one setting in a settings file, replaced as a whole; a new file can be read by its owner only."""
    LocalHost("head").write(path.resolve(), put(read_text(path), name, value).encode(), 0o600)


def read_text(path: Path) -> str:
    """Give the text of a settings file; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise usage_error("settings_unreadable", f"cannot read {path}: {reason}", f"look at `{path}`") from error
