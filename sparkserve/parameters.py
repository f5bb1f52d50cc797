"""What the owner may change about a recipe: effective parameters, ports, and extra engine arguments (pure)."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable

from pydantic import SecretStr

from sparkserve.addresses import is_loopback
from sparkserve.errors import Failures, SparkserveError, usage_error
from sparkserve.recipe import Parameters, Ports, Recipe
from sparkserve.settings import Settings, parse_env, read_private, read_secret, variable_name

_CHANGEABLE = ("model_name", "context", "requests", "drafts", "thinking")


def decide_parameters(settings: Settings, recipe: Recipe) -> Parameters:
    """Lay the settings over the recipe's parameters; raise with every value that the recipe cannot take."""
    own = recipe.parameters
    wanted = {name: value for name in _CHANGEABLE if (value := getattr(settings, name)) is not None}
    errors = [
        usage_error(
            "parameter_unknown",
            f"{variable_name(name)} is set to {wanted[name]}, but recipe {recipe.name} has no such value",
            f"remove {variable_name(name)} from the settings",
        )
        for name in wanted
        if getattr(own, name) is None
    ]
    found = own.model_copy(update=wanted)
    limits = (("drafts", own.drafts_limit, "draft tokens"), ("context", _most_tokens(recipe), "tokens"))
    for name, limit, unit in limits:
        value = getattr(found, name)
        if value is not None and limit is not None and value > limit:
            place = variable_name(name) if name in wanted else f"parameters.{name}"
            message = f"{place} is {value:,}, the recipe allows at most {limit:,} {unit}"
            errors.append(usage_error("parameter_limit", message, f"set {place} to {limit} or less"))
    if errors:
        raise Failures(errors)
    return found


def find_defaults(recipe: Recipe) -> dict[str, object]:
    """Give what a recipe decides where the settings say nothing, by the name of the setting."""
    own = {name: getattr(recipe.parameters, name) for name in _CHANGEABLE}
    ports, image = recipe.ports, recipe.image
    sources = {"engine_repository": image.engine_repository, "engine_revision": image.engine_revision}
    return {**own, "api_port": ports.api, "master_port": ports.master, **sources, "image": image.reference}


def _most_tokens(recipe: Recipe) -> int | None:
    """Give the longest context that model and key-value cache allow."""
    memory = recipe.memory
    fits = [recipe.parameters.context_limit] if recipe.parameters.context_limit else []
    if memory.kv_bytes and memory.kv_bytes_per_token:
        fits.append(int(memory.kv_bytes / memory.kv_bytes_per_token))
    return min(fits, default=None)


def decide_ports(settings: Settings, recipe: Recipe) -> Ports:
    """Lay the settings over the recipe's ports; all must differ."""
    wanted = {"api": settings.api_port, "master": settings.master_port}
    ports = recipe.ports.model_copy(update={name: port for name, port in wanted.items() if port})
    named = ports.named
    for name, port in named.items():
        others = [other for other in named if other != name and named[other] == port]
        if others:
            message = f"the ports {name} and {others[0]} cannot both be {port}"
            hint = f"set {variable_name('api_port')} or {variable_name('master_port')}"
            raise usage_error("ports_equal", message, hint)
    return ports


def api_address(settings: Settings, recipe: Recipe) -> str:
    """Give the base address of the API as the head reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.api_host, settings.api_host)  # noqa: S104 - compared
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{decide_ports(settings, recipe).api}"


def check_exposure(settings: Settings, recipe: Recipe) -> None:
    """Refuse an API that others can reach without a key, and a key that the engine could not be given."""
    if not (settings.api_key_file or settings.api_open or is_loopback(settings.api_host)):
        raise usage_error(
            "api_open",
            f"the API would listen on {settings.api_host} without a key",
            "sparkserve key new; or SPARKSERVE_API_HOST=127.0.0.1, or SPARKSERVE_API_OPEN=yes if everyone may use it",
        )
    by_text = any("${secret.api_key}" in text for text in recipe.templated_texts())
    takes_key = by_text or recipe.launch.api_key_mount or recipe.launch.api_key_env
    if settings.api_key_file is not None and not takes_key:
        message = f"SPARKSERVE_API_KEY_FILE is set, but recipe {recipe.name} cannot give its engine a key"
        raise usage_error("api_key_unsupported", message, "remove SPARKSERVE_API_KEY_FILE from the settings")


def read_secrets(settings: Settings) -> dict[str, SecretStr]:
    """Read what every `${secret.NAME}` stands for."""
    values: dict[str, SecretStr] = {}
    if settings.secrets_file is not None:
        found, errors = parse_env(read_private(settings.secrets_file, "secrets of the engine"))
        if errors:
            raise Failures(errors)
        values = {name: SecretStr(value) for name, value in found.items()}
    key = read_api_key(settings)
    return values if key is None else {**values, "api_key": key}


def read_api_key(settings: Settings) -> SecretStr | None:
    """Read the key that clients of the API must send; None where none is set."""
    if settings.api_key_file is None:
        return None
    try:
        return read_secret(settings.api_key_file, "the API key")
    except SparkserveError as error:
        error.hint = error.hint if error.code == "secret_readable" else "sparkserve key new --set"
        raise


def read_sudo_password(settings: Settings) -> SecretStr | None:
    """Read the sudo password of both nodes; None where no file has it."""
    file = settings.sudo_password_file
    return None if file is None else read_secret(file, "the sudo password")


def secrets_to_mask(settings: Settings) -> tuple[SecretStr | None, ...]:
    """List what no log may show; a file that cannot be read keeps nobody from looking at a pair, or ending it."""
    values: dict[str, SecretStr] = {}
    for alone in ("api_key_file", "secrets_file"):  # one that cannot be read hides nothing of the other
        with contextlib.suppress(SparkserveError):
            values |= read_secrets(settings.model_copy(update={alone: None}))
    return settings.hf_token, *values.values()


def launcher_flags(recipe: Recipe) -> frozenset[str]:
    """List every flag that the launcher itself may give to the engine, and its other spellings."""
    launch = recipe.launch
    of_worker = () if launch.worker_entrypoint else launch.words_of(1)  # another program is given no extra arguments
    words = (*launch.words_of(0), *of_worker, *launch.owned)
    return frozenset(flag_name(word) for word in words if is_flag(word))


def check_json(words: Iterable[str]) -> None:
    """Refuse an argument that begins as JSON and is none, before an engine meets it minutes later."""
    for word in words:
        value = word.partition("=")[2] if is_flag(word) else word
        if value.startswith(("{", "[")):
            try:
                json.loads(value)
            except ValueError as error:
                message = f"the argument {word} is no JSON: {error}"
                hint = "look at `launch` of the recipe and at SPARKSERVE_EXTRA_ARGS, and at the quotes there"
                raise usage_error("argument_json", message, hint) from error


def check_extra_args(extra_args: Iterable[str], owned: frozenset[str]) -> None:
    """Refuse, by name, every extra flag that is one of the launcher's own in whatever spelling."""
    errors = []
    for word in extra_args:
        if not is_flag(word):
            continue
        met = sorted(flag for flag in owned if _sets(flag_name(word), flag))
        if met:
            message = f"SPARKSERVE_EXTRA_ARGS: {word} sets {met[0]}, which the launcher sets on both ranks"
            errors.append(usage_error("extra_args_owned", message, "use the setting of that name, or leave it out"))
    if errors:
        raise Failures(errors)


def is_flag(word: str) -> bool:
    """Whether an argument is a flag; a negative number is a value."""
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit() and word != "-"


def flag_name(word: str) -> str:
    """Give the flag of an argument, as argparse knows it."""
    return word.partition("=")[0].replace("_", "-")


def _sets(given: str, flag: str) -> bool:
    """Whether a given word sets a flag, as argparse reads it: `--cont` is `--context`, and `-c9` is `-c 9`.

    `--config.key` sets a part of `--config`, and `--no-x` is `--x` the other way round.
    """
    if given.startswith("--"):
        given = given.partition(".")[0]
        return flag.startswith(given) or re.sub("^--no-", "--", flag).startswith(re.sub("^--no-", "--", given))
    rest = given.removeprefix(flag)
    # What goes on in letters, as `-ctk` does, is a flag of its own.
    return not flag.startswith("--") and rest != given and not rest.replace("-", "").isalpha()
