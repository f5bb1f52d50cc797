"""`.env`, environment and flags to one frozen `Settings`; every bad key is reported at once."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError, field_validator

from sparkserve.addresses import can_be_peer, check_worker_name, read_address
from sparkserve.errors import Failures, SparkserveError, usage_error

PREFIX = "SPARKSERVE_"
FOREIGN_NAMES = ("HF_TOKEN", "HF_ENDPOINT")
_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def _split_words(value: object) -> object:
    """Accept a JSON-free list: words as a shell would split them."""
    return tuple(shlex.split(value)) if isinstance(value, str) else value


def _parse_rate(value: object) -> object:
    """Read `40MB`, `2GB` or a plain number of bytes per second; 0 means no limit."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMG]?)(i?)(?:[bB](?:/s)?)?\s*", value)
    if match is None:
        raise ValueError("should be bytes per second, such as 40MB")
    number, unit, binary = match.groups()
    power = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3}[unit]
    return int(float(number) * (1024 if binary else 1000) ** power)


Words = Annotated[tuple[str, ...], BeforeValidator(_split_words)]
Rate = Annotated[int, BeforeValidator(_parse_rate)]


class Settings(BaseModel):
    """What the owner of the pair decides; a field that is None leaves the decision to the recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    worker: str = Field(
        "", description="The worker as ssh reaches it: address, name, alias of ~/.ssh/config or user@address"
    )
    ssh_port: int | None = Field(
        None, ge=1, le=65535, description="Port of the worker's sshd; else ~/.ssh/config or 22"
    )
    ssh_key: Path | None = Field(None, description="Private key file for the worker; else ~/.ssh/config or the agent")
    head_link: str = Field("", description="The head's own IPv4 address on the QSFP cable")
    worker_link: str = Field("", description="The worker's IPv4 address on the QSFP cable")
    recipe: str = Field(
        "tensorfold-1017",
        description="Name of a shipped recipe, path of a recipe directory, or git address of a trusted one",
    )
    models_dir: Path = Field(
        Path("~/sparkserve/models"), description="Where weights live, on both nodes; ~ is each node's home"
    )
    cache_dir: Path = Field(
        Path("~/sparkserve/cache"), description="Where engines keep compiled code and rank caches, on both nodes"
    )
    worker_models_dir: Path | None = Field(None, description="The worker's models_dir where it differs from the head's")
    worker_cache_dir: Path | None = Field(None, description="The worker's cache_dir where it differs from the head's")
    api_host: str = Field(
        "127.0.0.1", description="Address on which the API listens; anything but loopback needs a key, or api_open"
    )
    api_open: bool = Field(default=False, description="Whether everyone who reaches the API may use it without a key")
    api_port: int | None = Field(None, ge=1, le=65535, description="Port of the API")
    master_port: int | None = Field(None, ge=1, le=65535, description="Port on which the ranks meet, on the link")
    api_key_file: Path | None = Field(None, description="File (mode 0600) with the key that API clients must send")
    secrets_file: Path | None = Field(
        None, description="File (mode 0600) of NAME=value lines: what `${secret.NAME}` of a recipe stands for"
    )
    model_name: str | None = Field(None, min_length=1, description="The name under which the API serves the model")
    context: int | None = Field(None, ge=256, description="Longest context, in tokens")
    requests: int | None = Field(None, ge=1, le=256, description="Requests served side by side")
    drafts: int | None = Field(None, ge=0, le=16, description="Draft tokens per step; 0 turns drafting off")
    thinking: bool | None = Field(None, description="Whether replies think by default")
    image: str | None = Field(None, description="A finished engine image by digest, for recipes that cannot name one")
    engine_repository: str | None = Field(None, description="Git address of the engine, in place of the recipe's")
    engine_revision: str | None = Field(
        None, description="Branch, tag or commit of the engine, in place of the recipe's"
    )
    extra_args: Words = Field((), description="More engine arguments for both ranks, split as a shell would")
    rate_limit: Rate = Field(
        0, ge=0, description="Most bytes per second that a download takes, such as 40MB; 0 is no limit"
    )
    sudo_password_file: Path | None = Field(
        None, description="File (mode 0600) with the sudo password of both nodes, for runs without a terminal"
    )
    watch_command: Words = Field(
        (), description="Command that `watch` calls with each event, as one JSON object on its standard input"
    )
    restarts_per_hour: int = Field(
        3, ge=0, description="Restarts by `watch` within an hour before it leaves a pair down"
    )
    hf_token: SecretStr | None = Field(None, description="Hugging Face token, sent to the hub's own host only")
    hf_endpoint: str = Field("https://huggingface.co", description="The hub, or a mirror of it")

    @field_validator("*", mode="before")
    @classmethod
    def _has_no_blank_ends(cls, value: object) -> object:
        # Outside of quotes `.env` has none; what quotes or the environment keep is meant, and no setting takes it.
        if isinstance(value, str) and value != value.strip():
            raise ValueError("should neither begin nor end with a blank")
        return value

    @field_validator("head_link", "worker_link")
    @classmethod
    def _is_link_address(cls, value: str) -> str:
        address = read_address(value)
        if value and (address is None or address.version != 4):
            raise ValueError("should be an IPv4 address")
        if address and not can_be_peer(address):
            raise ValueError("should be the address of the cable's interface, not loopback")
        return value

    @field_validator("api_host")
    @classmethod
    def _is_bind_address(cls, value: str) -> str:
        if read_address(value) is None:
            raise ValueError("should be an IP address, such as 127.0.0.1 or 0.0.0.0")
        return value

    @field_validator("worker")
    @classmethod
    def _is_other_machine(cls, value: str) -> str:
        if value:
            check_worker_name(value)
        return value

    @field_validator("models_dir", "cache_dir", "worker_models_dir", "worker_cache_dir")
    @classmethod
    def _is_whole_path(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute() and value.parts[:1] != ("~",):
            raise ValueError("should begin with / or ~/, since it is read on both nodes")
        return value

    @field_validator("hf_endpoint")
    @classmethod
    def _is_http(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
            raise ValueError("should be an http or https address")
        return value.rstrip("/")


@dataclass(frozen=True)
class Loaded:
    """Settings together with where each value came from (`flag`, `environment`, a file, or `default`)."""

    settings: Settings
    sources: dict[str, str]
    env_file: Path


def nearest_name(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that was probably meant, as the end of a sentence; empty when none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def nearest_variable(name: str) -> str:
    """Suggest the setting that was probably meant; the prefix that all share says nothing about nearness."""
    known = {variable_name(field).removeprefix(PREFIX): variable_name(field) for field in Settings.model_fields}
    near = difflib.get_close_matches(name.upper().removeprefix(PREFIX), list(known), n=1, cutoff=0.6)
    return f"; did you mean {known[near[0]]}?" if near else ""


def variable_name(field: str) -> str:
    """Give the one name a setting has in `.env` and in the environment."""
    return field.upper() if field.upper() in FOREIGN_NAMES else PREFIX + field.upper()


def parse_env(text: str) -> tuple[dict[str, str], list[SparkserveError]]:
    """Read a strict `.env`: NAME=value, quotes, `export`, comments, CRLF and a BOM; nothing is expanded or run."""
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    errors = []
    # Not `splitlines`, which also splits at characters that are no line ends to anyone who edits the file.
    for number, raw in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        try:
            if match is None:
                raise ValueError("should be NAME=value")
            name, value = match[1], _parse_value(match[2])
            if name in values:
                text = f"line {number} sets {name} a second time, after line {lines[name]}"
                errors.append(usage_error("settings_syntax", text, f"remove one of the lines {lines[name]}, {number}"))
                continue
            values[name], lines[name] = value, number
        except ValueError as error:
            errors.append(usage_error("settings_syntax", f"line {number} {error}", "NAME=value, one a line"))
    return values, errors


def _parse_value(raw: str) -> str:
    text = raw.strip()
    if text[:1] in ("'", '"'):
        quote = text[0]
        pattern = r"'([^']*)'" if quote == "'" else r'"((?:[^"\\]|\\.)*)"'
        match = re.fullmatch(pattern + r"(?:\s+#.*)?", text)
        if match is None:
            raise ValueError("has a quote that does not close, or text after it")
        return match[1] if quote == "'" else re.sub(r'\\([\\"$`])', r"\1", match[1])
    return re.split(r"\s+#", raw, maxsplit=1)[0].strip()


def load(env_file: Path, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """Merge flags, environment and the file, in this order of strength; raise with every problem found."""
    errors: list[SparkserveError] = []
    file_values: dict[str, str] = {}
    try:
        file_values, errors = parse_env(env_file.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        # The environment and flags may be all there is; a file that was asked for by name should be there.
        if env_file.name != ".env":
            raise usage_error("settings_missing", f"there is no {env_file}", "look at --env-file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error("settings_unreadable", f"cannot read {env_file}: {error}", f"look at `{env_file}`") from None
    for wrong in errors:
        wrong.message = f"{env_file}, {wrong.message}"
    errors += _unknown_keys(file_values, f"in {env_file}")
    errors += _unknown_keys({name: "" for name in environment if name.startswith(PREFIX)}, "in the environment")
    merged, sources = _merge(env_file, file_values, environment, flags)
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        errors += [_explain(problem, sources) for problem in error.errors(include_input=False)]
    if errors:
        raise Failures(errors)
    return Loaded(settings, sources, env_file)


def _merge(
    env_file: Path, file_values: Mapping[str, str], environment: Mapping[str, str], flags: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    merged: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field in Settings.model_fields:
        name = variable_name(field)
        sources[field] = "default"
        if flags.get(field) is not None:
            merged[field], sources[field] = flags[field], "flag"
        elif environment.get(name):
            merged[field], sources[field] = environment[name], "environment"
        elif file_values.get(name):
            merged[field], sources[field] = file_values[name], str(env_file)
    return merged, sources


def _unknown_keys(values: Mapping[str, str], where: str) -> list[SparkserveError]:
    known = [variable_name(field) for field in Settings.model_fields]
    errors = []
    for name in values:
        if name not in known:
            text = f"unknown key {name} {where}{nearest_variable(name)}"
            errors.append(usage_error("settings_unknown", text, "`sparkserve config` lists them"))
    return errors


def _explain(problem: Any, sources: Mapping[str, str]) -> SparkserveError:  # noqa: ANN401 - pydantic's own typed dict
    field = str(problem["loc"][0])
    text = str(problem["msg"]).removeprefix("Value error, ")
    text = text[0].lower() + text[1:]
    description = Settings.model_fields[field].description or ""
    where = sources.get(field, "default")
    return usage_error(
        "settings_invalid", f"{variable_name(field)} ({where}): {text}", f"{variable_name(field)} is: {description}"
    )


def check_answer(field: str, value: str) -> None:
    """Refuse what one setting does not take."""
    try:
        Settings.model_validate({field: value})
    except ValidationError as error:
        problems = error.errors(include_input=False)
        raise Failures([_explain(problem, {field: "answer"}) for problem in problems]) from None


def process_environment() -> dict[str, str]:
    """Copy the environment once, so that nothing below reads it again."""
    return dict(os.environ)


def state_dir(environment: Mapping[str, str]) -> Path:
    """Give the XDG state directory of sparkserve on the head."""
    base = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "sparkserve"


def read_private(path: Path, purpose: str) -> str:
    """Read a text that only its owner may read; empty where it is no text."""
    path = path.expanduser()
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise usage_error("secret_missing", f"{path} ({purpose}) is a directory; needed: a file", f"`ls {path}`")
        if mode & 0o077:
            raise usage_error("secret_readable", f"{path} ({purpose}) can be read by others", f"chmod 600 {path}")
        return path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        return ""
    except OSError as error:
        message = f"cannot read {path} ({purpose}): {error.strerror}"
        raise usage_error("secret_missing", message, f"`ls -l {path}`; it should be yours, with mode 0600") from error


def read_secret(path: Path, purpose: str) -> SecretStr:
    """Read a one-line secret from a file that only its owner may read."""
    secret = read_private(path, purpose)
    if len(secret.splitlines()) != 1:
        raise usage_error("secret_invalid", f"{path} ({purpose}) should hold one line of text", f"`wc -l {path}`")
    return SecretStr(secret)
