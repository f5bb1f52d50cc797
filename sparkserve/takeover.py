"""A pair that somebody's script started, as a recipe that makes the same two containers (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkserve.addresses import is_loopback, read_address
from sparkserve.cluster import ROLES, Role
from sparkserve.container import BindMount, LinkPlace
from sparkserve.errors import EXIT_NOT_READY, SparkserveError
from sparkserve.takeover_facts import DEFAULT_STOP_SECONDS, Facts, Running
from sparkserve.takeover_families import Family, pairs, read_families, runs_engine
from sparkserve.takeover_texts import API_KEY, Translation, find_secrets, lay_together, name_apart, split_env

_GIB = 2**30
_ALL_ADDRESSES = ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared
_DEFAULT_MASTER_PORT = "29501"
_DEFAULT_CONTEXT = 4096
_INFINIBAND = "/dev/infiniband"
_VOLUME = re.compile(r"/volumes/([^/]+)/_data$")


@dataclass(frozen=True)
class Rank:
    """A running container that is a rank of an engine family."""

    running: Running
    family: Family
    rank: int


@dataclass(frozen=True)
class Pair:
    """Both ranks of one engine with one image, rank 0 on the head."""

    family: Family
    head: Running
    worker: Running

    @property
    def ranks(self) -> dict[Role, Running]:
        """Each rank by the role of its node."""
        return {"head": self.head, "worker": self.worker}

    @property
    def meets(self) -> bool:
        """Whether both are told the same place to meet."""
        head, worker = (self.family.read(one.words) for one in (self.head, self.worker))
        return all(head.get(name) == worker.get(name) for name in ("head.link.address", "ports.master"))

    def told(self) -> dict[str, str]:
        """Read what their flags tell; rank 0 is the one that serves."""
        return {**self.family.read(self.worker.words), **self.family.read(self.head.words)}


@dataclass(frozen=True)
class Takeover:
    """What came of it: the recipe's tables, secrets by name, settings by field, and what the owner should know."""

    recipe: dict[str, Any]
    secrets: dict[str, str]
    settings: dict[str, str]
    notes: tuple[str, ...]


# -- which two make the pair ------------------------------------------------------------------------------------------


def find_ranks(running: Sequence[Running]) -> list[Rank]:
    """Find the containers that are ranks of an engine, whoever made them."""
    families = read_families()
    found = ((one, family, _rank(one, family)) for one in running for family in families if family.is_in(one.words))
    return [Rank(one, family, rank) for one, family, rank in found if rank is not None]


def _rank(running: Running, family: Family) -> int | None:
    """Read the rank from the flags, else from the environment; a rank without a front end serves nothing itself."""
    told = family.read(running.words).get("rank")
    named = [value for name, value in running.env.items() if re.fullmatch(r"(\w+_)?RANK", name)]
    guess = ["1"] if "--headless" in running.words else []
    return next((int(value) for value in (told, *named, *guess) if value in ("0", "1")), None)


def find_pair(facts: Mapping[Role, Facts]) -> Pair:
    """Find the one pair of others that runs; raise with what every container is instead."""
    theirs = {role: [one for one in facts[role].running if not one.is_ours] for role in ROLES}
    ranks = {role: find_ranks(theirs[role]) for role in ROLES}
    found = [
        Pair(head.family, head.running, worker.running)
        for head in ranks["head"]
        for worker in ranks["worker"]
        if (head.rank, worker.rank) == (0, 1)
        and head.family.label == worker.family.label
        and (  # a loaded copy has other names and the same layers
            head.running.layers == worker.running.layers or set(head.running.digests) & set(worker.running.digests)
        )
    ]
    found = [pair for pair in found if pair.meets] or found
    if len(found) == 1:
        return found[0]
    if found:
        names = "; ".join(f"{pair.head.name} and {pair.worker.name}" for pair in found)
        other = found[-1]
        hint = f"end all but one, such as by `{other.head.stop_hint}` and on the worker `{other.worker.stop_hint}`"
        raise _refusal("takeover_many", f"more than one pair runs: {names}", hint)
    raise _refuse_none(theirs, ranks)


def _refuse_none(theirs: Mapping[Role, Sequence[Running]], ranks: Mapping[Role, Sequence[Rank]]) -> SparkserveError:
    """Say what every container is instead of a rank of a pair, and which rank is missing where half a pair runs."""
    rows = [f"{role}: {one.name} ({one.image}): {_explain(one, ranks)}" for role in ROLES for one in theirs[role]]
    there = [one for role in ROLES for one in ranks[role] if one.rank == ROLES.index(role)]
    missing = [role for role in ROLES if role not in [one.running.role for one in there]]
    if len(missing) != 1:
        hint = "start your own script first; rank 0 must run on the node where sparkserve is typed"
        return _refusal("takeover_none", "no pair of ranks of others runs on these nodes", hint, rows)
    half = ", ".join(f"{one.running.name} (rank {one.rank} of {one.family.label})" for one in there)
    message = f"only half of a pair runs: {half} on the {there[0].running.role}"
    hint = f"rank {ROLES.index(missing[0])} is missing on the {missing[0]}: start your own script there, too"
    return _refusal("takeover_half", message, hint, rows)


def _explain(running: Running, ranks: Mapping[Role, Sequence[Rank]]) -> str:
    known = next((rank for rank in ranks[running.role] if rank.running is running), None)
    if known is not None:
        if known.rank != ROLES.index(running.role):
            return f"rank {known.rank} of {known.family.label}, on the {running.role}"
        return f"rank {known.rank} of {known.family.label}; its other rank, with the same image, is not there"
    if runs_engine(running.words):
        return "an engine that is told no rank of two"
    if any(runs_engine(line.split()) for line in running.processes):
        return f"the engine runs beside `{running.entrypoint[0]}` (docker exec), and what it was given cannot be read"
    return "no engine that a recipe knows"


def _refusal(code: str, message: str, hint: str = "", rows: Sequence[str] = ()) -> SparkserveError:
    return SparkserveError(code, message, hint, details="\n".join(rows), exit_code=EXIT_NOT_READY)


# -- the recipe -------------------------------------------------------------------------------------------------------


def translate(
    pair: Pair, facts: Mapping[Role, Facts], links: Mapping[Role, LinkPlace], served: Mapping[str, str]
) -> Takeover:
    """Write a running pair down as a recipe, with its secrets apart; `served` is what their API tells of itself."""
    _check_network(pair)
    told = {**served, **pair.told()}
    secrets = name_apart([find_secrets(running, pair.family.label) for running in pair.ranks.values()])
    key_file = _key_file(pair.head)
    host = told.get("api_host", "")
    is_open, has_key = bool(host) and not is_loopback(host), API_KEY in secrets.values() or key_file is not None
    warnings = _check_exposure(pair.head, host, has_key=has_key) if is_open else []
    values = _values(told)
    if host == "127.0.0.1" or (is_open and has_key):
        values["api_host"] = host
    known = Translation(pair.family, secrets, links, {**values, "head.link.address": links["head"].address})
    numbers = {name: int(values[name]) for name in ("context", "requests") if name in values}
    recipe: dict[str, Any] = {
        **_identity(pair, values["model_name"]),
        "warnings": warnings,
        "weights": [],
        "parameters": {"model_name": values["model_name"], "context": _DEFAULT_CONTEXT, **numbers},
        "ports": {"api": int(values["ports.api"]), "master": int(values["ports.master"])},
        "image": _image(pair),
        "container": {**_container(pair, links), "mounts": list(_mounts(pair, key_file))},
        "launch": _launch(known, pair),
        "memory": _memory(facts),
        "verify": {"checks": ["answer"]},
        **pair.family.tables,
    }
    settings = {"api_host": host} if is_open and has_key else {}
    if key_file is not None:
        recipe["launch"]["api_key_mount"], settings["api_key_file"] = key_file.target, key_file.source
    by_name = {name: value for value, name in secrets.items()}
    return Takeover(recipe, by_name, settings, (*warnings, *_notes(pair, links)))


def _check_network(pair: Pair) -> None:
    for running in (pair.head, pair.worker):
        if running.options["network_mode"] != "host":
            message = f"{running.name} has a network of its own ({running.options['network_mode']}); needed: the host's"
            hint = "the ranks of a recipe meet on the cable itself: run your script with --network host"
            raise SparkserveError("takeover_network", message, hint, running.role, exit_code=EXIT_NOT_READY)


def _check_exposure(running: Running, host: str, *, has_key: bool) -> list[str]:
    """Refuse an API that ours would not open to others; gives a warning where it is as open as it was before."""
    if has_key and read_address(host):
        return []
    if not has_key and host in _ALL_ADDRESSES:
        return [f"the API listens on {host} without a key, as it did before: anyone who reaches it can use it"]
    how = f"{host}, which is a name" if has_key else f"{host} without a key"
    hint = "give it --host 127.0.0.1, or an API key and --host with an address such as 0.0.0.0"
    message = f"the API of {running.name} listens on {how}: ours would not"
    raise SparkserveError("takeover_open", message, hint, running.role, exit_code=EXIT_NOT_READY)


def _values(told: Mapping[str, str]) -> dict[str, str]:
    """Give the values that placeholders stand for; what is no number of ours stays in the arguments as it is."""
    if not told.get("ports.api", "").isdigit():
        hint = "give rank 0 its --port, and look whether it answers"
        raise _refusal("takeover_port", "the port of their API is neither in their arguments nor found", hint)
    if not told.get("model_name"):
        hint = "look whether it answers: curl http://127.0.0.1:PORT/v1/models"
        raise _refusal("takeover_model", "nobody says under which name their API serves the model", hint)
    numbers = {name: told[name] for name in ("context", "requests") if told.get(name, "").isdigit()}
    own = {name: told[name] for name in ("ports.api", "model_name")}
    return {**own, "ports.master": told.get("ports.master", _DEFAULT_MASTER_PORT), **numbers}


def _identity(pair: Pair, model: str) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": re.sub(r"[^a-z0-9.-]+", "-", model.lower()).strip("-.") or "taken-over",
        "title": f"{model} on {pair.family.label}, taken over from {pair.head.name} and {pair.worker.name}",
        "engine": pair.family.label,
        "why": "written by `sparkserve init --from-running` from two containers that served",
    }


def _notes(pair: Pair, links: Mapping[Role, LinkPlace]) -> Iterator[str]:
    told = pair.told()
    master = told.get("head.link.address", "")
    if master and master != links["head"].address:
        yield f"their ranks meet at {master}, which is not the head's address on the cable ({links['head'].address})"
    if not told.get("context", "").isdigit():
        yield "their arguments do not say the longest context: set `parameters.context` of the recipe to what holds"
    sources = {mount.source for running in pair.ranks.values() for mount in running.mounts}
    for volume in sorted(match[1] for match in map(_VOLUME.search, sources) if match):
        yield f"their volume {volume} is used where it lies: `docker volume prune` would take it for unused"


def _launch(known: Translation, pair: Pair) -> dict[str, Any]:
    (head_words, head_variables), (worker_words, worker_variables) = known.of(pair.head), known.of(pair.worker)
    argv, head_argv, worker_argv = lay_together(head_words, worker_words)
    env, head_env, worker_env = split_env(head_variables, worker_variables)
    own: dict[str, Any] = {"head_argv": head_argv, "worker_argv": worker_argv}
    own |= {"env": env, "head_env": head_env, "worker_env": worker_env}
    return {"argv": argv, **{name: value for name, value in own.items() if value}}


def _image(pair: Pair) -> dict[str, Any]:
    """Name the image by a digest that its registry knows, else by the id that the head's engine knows."""
    shared = sorted(set(pair.head.digests) & set(pair.worker.digests)) or sorted(pair.head.digests)
    return {
        "reference": shared[0] if shared else pair.head.image_id,
        "architecture": "any",
        "entrypoint": list(pair.head.entrypoint),
        "expected_bytes": pair.head.image_bytes,
    }


def _container(pair: Pair, links: Mapping[Role, LinkPlace]) -> dict[str, Any]:
    """Give their options; what a privileged container had anyway is named, since ours never is one."""
    theirs = pair.head.options
    names = ("gpus", "ipc", "shm_bytes", "devices", "capabilities", "ulimits", "oom_score_adj")
    options = {name: theirs[name] for name in names if name != "shm_bytes" or theirs["ipc"] == "private"}
    options |= {name: theirs[name] for name in ("pids_limit", "user") if theirs[name]}
    if theirs["directory"] != pair.head.image_directory:
        options["directory"] = theirs["directory"]
    if theirs["stop_seconds"] != DEFAULT_STOP_SECONDS:
        options["stop_seconds"] = theirs["stop_seconds"]
    if theirs["privileged"] and links["head"].hcas:
        options["devices"] = sorted({*options["devices"], _INFINIBAND})
        options["capabilities"] = sorted({*options["capabilities"], "IPC_LOCK"})
        options["ulimits"] = {"memlock": -1, **options["ulimits"]}
    return options


def _key_file(head: Running) -> BindMount | None:
    """Find the file with the API's keys that they mount."""
    named = {value for flag, value in pairs(head.words) if flag == "--api-key-file"}
    named |= {value for name, value in head.env.items() if name.endswith("API_KEY_FILE")}
    return next((mount for mount in head.mounts if mount.target in named), None)


def _mounts(pair: Pair, key_file: BindMount | None) -> Iterator[dict[str, Any]]:
    """Give every place of theirs, used where it lies; those of one rank only with that rank."""
    of_rank = [mount for mount in pair.head.mounts if mount != key_file], pair.worker.mounts
    for mount in dict.fromkeys((*of_rank[0], *of_rank[1])):
        ranks = [rank for rank in (0, 1) if mount in of_rank[rank]]
        fixed = {"writable": not mount.read_only, "must_exist": True, **({} if len(ranks) == 2 else {"ranks": ranks})}
        yield {"source": mount.source.replace("${", "${dollar}{"), "target": mount.target, **fixed}


def _memory(facts: Mapping[Role, Facts]) -> dict[str, Any]:
    """Ask for a part of what was in use while they served, which was not all theirs, and for no more than they left."""
    floor = min(2.0, min(facts[role].available_bytes for role in ROLES) / _GIB / 2)
    used = max(facts[role].used_bytes for role in ROLES) / _GIB
    return {"required_gib": round(max(0.6 * used, floor), 1), "floor_gib": round(floor, 1)}
