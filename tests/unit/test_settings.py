from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from sparkserve.errors import EXIT_USAGE, SparkserveError, flatten
from sparkserve.settings import Loaded, Settings, load, nearest_variable, parse_env, read_secret, variable_name
from tests.unit.cases import read_rows, row_name

NO_FILE = Path("/nonexistent/.env")


def failures(env_file: Path, environment: dict[str, str]) -> list[SparkserveError]:
    with pytest.raises(SparkserveError) as caught:
        load(env_file, environment, {})
    assert caught.value.exit_code == EXIT_USAGE
    return flatten(caught.value)


def in_bash(text: str, names: list[str], tmp_path: Path) -> dict[str, str]:
    (tmp_path / "env").write_bytes(text.encode())
    script = '. "$1" 2>/dev/null; shift; for name; do printf "%s=%s\\0" "$name" "${!name}"; done'
    argv = ["env", "-i", "HOME=/home/other", "LC_ALL=C.UTF-8", "PATH=/usr/bin:/bin"]
    argv += ["bash", "-c", script, "bash", str(tmp_path / "env"), *names]
    answer = subprocess.run(argv, capture_output=True, check=True, timeout=10).stdout.decode()
    return dict(item.split("=", 1) for item in answer.split("\0") if item)


@pytest.mark.parametrize("case", read_rows("settings", "grammar"), ids=row_name)
def test_grammar(case: dict[str, Any]) -> None:
    values, errors = parse_env(case["text"])
    assert (values, errors) == (case["values"], [])


@pytest.mark.parametrize(
    "case", [row for row in read_rows("settings", "grammar") if "un" not in row["bash"]], ids=row_name
)
def test_grammar_against_bash(case: dict[str, Any], tmp_path: Path) -> None:
    from_bash = in_bash(case["text"], list(case["values"]), tmp_path)
    assert (from_bash == case["values"]) == (case["bash"] == "same"), from_bash


@pytest.mark.parametrize("case", read_rows("settings", "grammar_errors"), ids=row_name)
def test_grammar_errors(case: dict[str, Any]) -> None:
    _, errors = parse_env(case["text"])
    assert [error.message for error in errors] == case["errors"]
    assert "secret" not in repr(errors)


@pytest.mark.parametrize("case", read_rows("settings", "invalid"), ids=row_name)
def test_invalid_values(case: dict[str, Any]) -> None:
    found = failures(NO_FILE, case["environment"])
    assert sorted(error.message.partition(" ")[0] for error in found) == case["keys"]
    assert {error.code for error in found} == {"settings_invalid"}
    assert case.get("says", "") in found[0].message
    assert all(error.hint.startswith(f"{error.message.partition(' ')[0]} is: ") for error in found)


@pytest.mark.parametrize("case", read_rows("settings", "values"), ids=row_name)
def test_values(case: dict[str, Any]) -> None:
    found = getattr(load(NO_FILE, {case["key"]: case["text"]}, {}).settings, case["field"])
    assert (list(found) if isinstance(found, tuple) else found) == case["value"]


@pytest.mark.parametrize("case", read_rows("settings", "nearest"), ids=row_name)
def test_nearest_name(case: dict[str, Any]) -> None:
    expected = f"; did you mean {case['nearest']}?" if case["nearest"] else ""
    assert nearest_variable(case["name"]) == expected


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text("SPARKSERVE_API_PORT=x\nnonsense\nSPARKSERVE_HEDA_LINK=10.0.0.1\nOTHER=1\n")
    found = failures(env_file, {"SPARKSERVE_WORKR": "spark", "SPARKSERVE_CONTEXT": "-3"})
    assert sorted(error.code for error in found) == [
        "settings_invalid",
        "settings_invalid",
        "settings_syntax",
        "settings_unknown",
        "settings_unknown",
        "settings_unknown",
    ]
    messages = [error.message for error in found]
    assert f"unknown key SPARKSERVE_HEDA_LINK in {env_file}; did you mean SPARKSERVE_HEAD_LINK?" in messages
    assert "unknown key SPARKSERVE_WORKR in the environment; did you mean SPARKSERVE_WORKER?" in messages
    assert f"unknown key OTHER in {env_file}" in messages


def test_variables_of_others_are_left_alone() -> None:
    environment = {"PATH": "/bin", "HF_HOME": "/x", "SPARK_HOME": "/y", "sparkserve_x": "z", "WORKER": "w"}
    assert load(NO_FILE, environment, {}).settings == Settings()


def test_the_stronger_source_wins_and_is_named(tmp_path: Path) -> None:
    env_file = tmp_path / ".env"
    env_file.write_text(
        "".join(f"SPARKSERVE_{name}=500{n}\n" for n, name in enumerate(("API_PORT", "MASTER_PORT", "SSH_PORT")))
    )
    environment = {"SPARKSERVE_API_PORT": "6000", "SPARKSERVE_MASTER_PORT": "6001", "SPARKSERVE_SSH_PORT": ""}
    loaded = load(env_file, environment, {"api_port": 7000, "recipe": None})
    settings, sources = loaded.settings, loaded.sources
    assert (settings.api_port, settings.master_port, settings.ssh_port) == (7000, 6001, 5002)
    named = [sources[name] for name in ("api_port", "master_port", "ssh_port", "recipe")]
    assert named == ["flag", "environment", str(env_file), "default"]
    assert set(sources) == set(Settings.model_fields)


def test_a_flag_of_zero_or_false_counts() -> None:
    loaded = load(NO_FILE, {"SPARKSERVE_DRAFTS": "4", "SPARKSERVE_THINKING": "1"}, {"drafts": 0, "thinking": False})
    assert (loaded.settings.drafts, loaded.settings.thinking) == (0, False)
    assert loaded.sources["drafts"] == "flag"


def test_no_value_is_ever_in_an_error_or_a_repr(tmp_path: Path) -> None:
    secret = "hf_TopSecretValue"
    env_file = tmp_path / ".env"
    every_field = "".join(f"{variable_name(field)}='{secret} \x7f/-@{{'\n" for field in Settings.model_fields)
    env_file.write_text(every_field + f"{secret}\nA='{secret}\n")
    found = failures(env_file, {"SPARKSERVE_NOPE": secret})
    assert len(found) > 10
    assert secret not in "".join(f"{error} {error.hint} {error.details} {error!r}" for error in found)
    loaded = load(NO_FILE, {"HF_TOKEN": secret}, {})
    assert loaded.settings.hf_token is not None
    assert loaded.settings.hf_token.get_secret_value() == secret
    assert secret not in f"{loaded!r} {loaded.settings!r} {loaded.settings} {loaded.settings.model_dump_json()}"


@pytest.mark.parametrize("content", [b"SPARKSERVE_API_PORT=hf_TopSecretValue\n", b"A=hf_TopSecretValue\xff\n"])
def test_the_cause_of_an_error_holds_no_value_either(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(SparkserveError) as caught:
        load(tmp_path / ".env", {}, {})
    assert "TopSecret" not in repr(caught.value.__cause__)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("kind", ["directory", "not UTF-8"])
def test_a_file_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ".env"
    path.mkdir() if kind == "directory" else path.write_bytes(b"A=\xff\xfe")
    assert [error.code for error in failures(path, {})] == ["settings_unreadable"]


def secret_file(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("content", [b"s3cret", b"s3cret\n", b"s3cret\r\n"])
def test_read_secret(tmp_path: Path, content: bytes) -> None:
    secret = read_secret(secret_file(tmp_path, content), "key")
    assert secret.get_secret_value() == "s3cret"
    assert "s3cret" not in repr(secret)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o602, 0o610])
def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, b"s3cret", mode)
    with pytest.raises(SparkserveError, match="can be read by others") as caught:
        read_secret(path, "key")
    assert (caught.value.code, caught.value.hint) == ("secret_readable", f"chmod 600 {path}")


@pytest.mark.parametrize("content", [b"", b"\n", b"s3cret\nother\n", b"s3cret\xff\xfe"])
def test_a_file_that_holds_no_one_line_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SparkserveError) as caught:
        read_secret(secret_file(tmp_path, content), "key")
    assert (caught.value.code, caught.value.exit_code) == ("secret_invalid", EXIT_USAGE)
    assert "s3cret" not in repr(caught.value)


def test_a_directory_is_no_secret_and_is_not_to_be_locked(tmp_path: Path) -> None:
    with pytest.raises(SparkserveError, match="is a directory; needed: a file") as caught:
        read_secret(tmp_path, "key of the API")
    assert (caught.value.code, "chmod" in caught.value.hint) == ("secret_missing", False)


def test_a_secret_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SparkserveError) as caught:
        read_secret(tmp_path / "none", "key of the API")
    assert caught.value.code == "secret_missing"
    assert "key of the API" in caught.value.message


@pytest.mark.parametrize("name", ["spark-2", "me@10.0.0.2", "fe80::1%eth0", "a.b@Spark_2", "DOMAIN\\me@host", "me@x@h"])
def test_names_that_ssh_takes(name: str) -> None:
    assert load(NO_FILE, {"SPARKSERVE_WORKER": name}, {}).settings.worker == name


def test_settings_are_frozen() -> None:
    loaded = Loaded(Settings(), {}, NO_FILE)
    with pytest.raises(ValueError, match="frozen"):
        loaded.settings.worker = "x"  # type: ignore[misc]
