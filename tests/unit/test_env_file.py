from __future__ import annotations

from pathlib import Path

import pytest

from sparkserve.env_file import put, render, set_line
from sparkserve.errors import SparkserveError
from sparkserve.settings import Settings, load, parse_env, variable_name
from tests.unit.test_hosts import WEIRD_WORDS

# Every value travels through the file as it is, or is refused.
VALUES = ["/data/my models", "a # b", "#", "it's", '"quoted"', "back\\slash", "$HOME `x`", " padded ", "ü", "a=b"]


@pytest.mark.parametrize("value", VALUES)
def test_a_value_comes_back_as_it_was(value: str) -> None:
    values, errors = parse_env(render([], {"models_dir": value}, {}))
    assert (values, errors) == ({"SPARKSERVE_MODELS_DIR": value}, [])
    assert parse_env(put("", "models_dir", value))[0] == {"SPARKSERVE_MODELS_DIR": value}


@pytest.mark.parametrize("value", [word for word in WEIRD_WORDS if "\n" not in word])
def test_a_weird_value_comes_back(value: str) -> None:
    assert parse_env(put("", "models_dir", value))[0] == {"SPARKSERVE_MODELS_DIR": value}


def test_what_is_no_line_is_refused() -> None:
    with pytest.raises(SparkserveError) as caught:
        put("", "models_dir", "two\nlines")
    assert caught.value.code == "settings_unwritable"


def test_every_setting_is_there_once_with_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text(render(["Ours."], {"worker": "spark", "requests": "2"}, {"ssh_port": "2222"}))
    lines = path.read_text().splitlines()
    for name, field in Settings.model_fields.items():
        found = [line for line in lines if line.removeprefix("# ").startswith(f"{variable_name(name)}=")]
        assert len(found) == 1, name
        assert lines[lines.index(found[0]) - 1] == f"# {field.description}."
    assert "# SPARKSERVE_SSH_PORT=2222" in lines
    loaded = load(path, {}, {})
    assert {name for name, source in loaded.sources.items() if source != "default"} == {"worker", "requests"}


@pytest.mark.parametrize("kind", ["directory", "binary"])
def test_a_file_that_holds_no_settings_is_left(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".env"
    path.mkdir() if kind == "directory" else path.write_bytes(b"\xff\x00")
    with pytest.raises(SparkserveError) as caught:
        set_line(path, "api_port", "9")
    assert (caught.value.code, caught.value.exit_code) == ("settings_unreadable", 2)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "SPARKSERVE_API_PORT=9\n"),
        ("A=1", "A=1\nSPARKSERVE_API_PORT=9\n"),
        ("# x\n# SPARKSERVE_API_PORT=8888\nA=1\n", "# x\nSPARKSERVE_API_PORT=9\nA=1\n"),
        ("# SPARKSERVE_API_PORT=1\nexport SPARKSERVE_API_PORT=2\n", "# SPARKSERVE_API_PORT=1\nSPARKSERVE_API_PORT=9\n"),
    ],
)
def test_one_setting_takes_its_own_place(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / ".env"
    path.write_text(before)
    set_line(path, "api_port", "9")
    assert path.read_text() == after
    assert path.stat().st_mode & 0o777 == 0o600
    set_line(path, "api_port", "9")
    assert path.read_text() == after
