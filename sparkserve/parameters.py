"""What the owner may change about a recipe: effective parameters, ports, and extra engine arguments (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sparkserve.errors import Failures, SparkserveError, usage_error
from sparkserve.recipe import Parameters, Ports, Recipe
from sparkserve.settings import Settings, variable_name

_CHANGEABLE = ("model_name", "context", "requests", "drafts", "thinking")
_LOOPBACK = ("127.", "::1")


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
    errors += _over_limit(wanted.get("context"), own.context_limit, "context", "tokens")
    errors += _over_limit(wanted.get("drafts"), own.drafts_limit, "drafts", "draft tokens")
    if errors:
        raise Failures(errors)
    return own.model_copy(update=wanted)


def _over_limit(value: object, limit: int | None, field: str, unit: str) -> list[SparkserveError]:
    if not isinstance(value, int) or limit is None or value <= limit:
        return []
    name = variable_name(field)
    message = f"{name} is {value:,}, the recipe allows at most {limit:,} {unit}"
    return [usage_error("parameter_limit", message, f"set {name} to {limit} or less")]


def decide_ports(settings: Settings, recipe: Recipe) -> Ports:
    """Lay the settings over the recipe's ports; the two must differ."""
    ports = Ports(
        api=settings.api_port or recipe.ports.api,
        master=settings.master_port or recipe.ports.master,
    )
    if ports.api == ports.master:
        message = f"the API and the ranks cannot share port {ports.api}"
        raise usage_error("ports_equal", message, f"set {variable_name('api_port')} or {variable_name('master_port')}")
    return ports


def api_address(settings: Settings, recipe: Recipe) -> str:
    """Give the base address of the API as the head reaches it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.api_host, settings.api_host)  # noqa: S104 - compared
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"http://{host}:{decide_ports(settings, recipe).api}"


def check_exposure(settings: Settings, recipe: Recipe) -> None:
    """Refuse an API that others can reach without a key, and a key that the engine could not be given."""
    if settings.api_key_file is None and not settings.api_host.startswith(_LOOPBACK):
        raise usage_error(
            "api_open",
            f"the API would listen on {settings.api_host} without a key",
            "set SPARKSERVE_API_KEY_FILE to a file (mode 0600) that holds one, or SPARKSERVE_API_HOST=127.0.0.1",
        )
    if settings.api_key_file is not None and not recipe.launch.api_key_mount:
        message = f"SPARKSERVE_API_KEY_FILE is set, but recipe {recipe.name} cannot give its engine a key"
        raise usage_error("api_key_unsupported", message, "remove SPARKSERVE_API_KEY_FILE from the settings")


def launcher_flags(recipe: Recipe) -> frozenset[str]:
    """List every flag that the launcher itself may give to the engine."""
    return frozenset(_flag(word) for word in _launcher_words(recipe) if _is_flag(word))


def _launcher_words(recipe: Recipe) -> Iterator[str]:
    launch = recipe.launch
    yield from (*launch.argv, *launch.head_argv, *launch.worker_argv)
    for switch in launch.switches:
        yield from (*switch.on, *switch.off)


def check_extra_args(extra_args: Iterable[str], owned: frozenset[str]) -> None:
    """Refuse, by name, every extra flag that equals or abbreviates one of the launcher's own."""
    errors = []
    for word in extra_args:
        if not _is_flag(word):
            continue
        # argparse takes any unambiguous beginning of a long flag for the flag itself
        met = sorted(flag for flag in owned if flag == _flag(word) or _abbreviates(_flag(word), flag))
        if met:
            message = f"SPARKSERVE_EXTRA_ARGS: {word} sets {met[0]}, which the launcher sets on both ranks"
            errors.append(usage_error("extra_args_owned", message, "use the setting of that name, or leave it out"))
    if errors:
        raise Failures(errors)


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word.lstrip("-")[:1].isdigit() and word != "-"


def _flag(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")


def _abbreviates(given: str, flag: str) -> bool:
    return given.startswith("--") and flag.startswith(given)
