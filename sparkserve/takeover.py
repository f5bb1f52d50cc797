"""A pair that somebody's script started, as a recipe that makes the same two containers (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparkserve.cluster import ROLES, Role
from sparkserve.container import LinkPlace
from sparkserve.errors import EXIT_NOT_READY, SparkserveError
from sparkserve.takeover_facts import Facts, Running
from sparkserve.takeover_families import Family, read_families, runs_engine
from sparkserve.takeover_texts import API_KEY, Translation, Words, find_secrets, lay_together, name_apart, split_env

_GIB = 2**30
_ALL_ADDRESSES = ("0.0.0.0", "::", "[::]")  # noqa: S104 - compared
_DEFAULT_MASTER_PORT = 29501
_DEFAULT_CONTEXT = 4096
# Docker's own, which says that nobody thought of it.
_UNSET_STOP_SECONDS = 10
_INFINIBAND = "/dev/infiniband"


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

    def told(self) -> dict[str, str]:
        """Read what their flags tell; rank 0 is the one that serves."""
        return {**self.family.read(self.worker.words), **self.family.read(self.head.words)}


@dataclass(frozen=True)
class Served:
    """What was seen of the API while they serve: its port, and the name of the model; None where nobody answered."""

    port: int | None
    model: str | None


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
    pairs = [
        Pair(head.family, head.running, worker.running)
        for head in ranks["head"]
        for worker in ranks["worker"]
        if (head.rank, worker.rank) == (0, 1)
        and head.family.label == worker.family.label
        and is_same_image(head.running, worker.running)
    ]
    if len(pairs) == 1:
        return pairs[0]
    if pairs:
        names = "; ".join(f"{pair.head.name} and {pair.worker.name}" for pair in pairs)
        raise _refusal("takeover_many", f"more than one pair runs: {names}", "stop all but the one to take over")
    rows = [f"{role}: {one.name} ({one.image}): {_explain(one, ranks)}" for role in ROLES for one in theirs[role]]
    hint = "start your own script first; rank 0 must run on the node where sparkserve is typed"
    missing = [role for role in ROLES if ROLES.index(role) not in [one.rank for one in ranks[role]]]
    if len(missing) == 1:
        hint = f"rank {ROLES.index(missing[0])} is missing on the {missing[0]}: start your own script there, too"
    raise _refusal("takeover_none", "no pair of ranks of others runs on these nodes", hint, rows)


def is_same_image(head: Running, worker: Running) -> bool:
    """Whether both run one image; a loaded copy has other names and the same layers."""
    return head.layers == worker.layers or bool(set(head.digests) & set(worker.digests))


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


def translate(pair: Pair, facts: Mapping[Role, Facts], links: Mapping[Role, LinkPlace], served: Served) -> Takeover:
    """Write a running pair down as a recipe, with its secrets apart."""
    _check_network(pair)
    told = pair.told()
    secrets = name_apart([find_secrets(running, pair.family.label) for running in (pair.head, pair.worker)])
    key_file = _key_file(pair.head)
    exposure = _Exposure(told.get("api_host", ""), has_key=API_KEY in secrets.values() or key_file is not None)
    exposure.check(pair.head)
    values = _values(told, served, exposure)
    known = Translation(pair.family, secrets, links, {**values, "head.link.address": links["head"].address})
    launch = _launch(known.of(pair.head), known.of(pair.worker))
    mounts = list(_mounts(pair, key_file))
    if key_file is not None:
        launch["api_key_mount"] = key_file[0]
    settings = {"api_key_file": key_file[1]} if key_file else {}
    settings |= {"api_host": exposure.host} if exposure.is_open and exposure.has_key else {}
    notes = [*exposure.notes(), *_notes(told, links)]
    recipe = {
        **_identity(pair, values, served),
        "warnings": list(exposure.notes()),
        "weights": [],
        "parameters": _parameters(values, served),
        "ports": {"api": int(values["ports.api"]), "master": int(values["ports.master"])},
        "image": _image(pair),
        "container": {**_container(pair, links), "mounts": mounts},
        "launch": launch,
        "memory": _memory(facts),
        "verify": {"checks": ["answer"]},
        **pair.family.tables,
    }
    return Takeover(recipe, {name: value for value, name in secrets.items()}, settings, tuple(notes))


def _check_network(pair: Pair) -> None:
    for running in (pair.head, pair.worker):
        if running.options["network_mode"] != "host":
            message = f"{running.name} has a network of its own ({running.options['network_mode']}); needed: the host's"
            hint = "the ranks of a recipe meet on the cable itself: run your script with --network host"
            raise SparkserveError("takeover_network", message, hint, running.role, exit_code=EXIT_NOT_READY)


@dataclass(frozen=True)
class _Exposure:
    """Where their API listens; empty where their arguments do not say it."""

    host: str
    has_key: bool

    @property
    def is_open(self) -> bool:
        return bool(self.host) and not self.host.startswith(("127.", "::1", "localhost"))

    def check(self, running: Running) -> None:
        if self.is_open and not self.has_key and self.host not in _ALL_ADDRESSES:
            message = f"the API of {running.name} listens on {self.host} without a key, which sparkserve does not start"
            hint = "give it --host 127.0.0.1, or an API key"
            raise SparkserveError("takeover_open", message, hint, running.role, exit_code=EXIT_NOT_READY)

    def notes(self) -> tuple[str, ...]:
        if self.is_open and not self.has_key:
            return (
                f"the API listens on {self.host} without a key, as it did before: anyone who reaches it can use it",
            )
        return ()


def _values(told: Mapping[str, str], served: Served, exposure: _Exposure) -> dict[str, str]:
    """Give the values that placeholders stand for; what is no number of ours stays in the arguments as it is."""
    port = told.get("ports.api") or (str(served.port) if served.port else "")
    if not port.isdigit():
        hint = "give rank 0 its --port, and look whether it answers"
        raise _refusal("takeover_port", "the port of their API is neither in their arguments nor found", hint)
    numbers = {name: told[name] for name in ("context", "requests") if told.get(name, "").isdigit()}
    values = {"ports.api": port, "ports.master": told.get("ports.master", str(_DEFAULT_MASTER_PORT)), **numbers}
    values |= {"model_name": told["model_name"]} if "model_name" in told else {}
    if exposure.host == "127.0.0.1" or (exposure.is_open and exposure.has_key):
        values["api_host"] = exposure.host
    return values


def _identity(pair: Pair, values: Mapping[str, str], served: Served) -> dict[str, Any]:
    model = values.get("model_name") or served.model
    if not model:
        hint = "look whether it answers: curl http://127.0.0.1:PORT/v1/models"
        raise _refusal("takeover_model", "nobody says under which name their API serves the model", hint)
    return {
        "schema": 1,
        "name": re.sub(r"[^a-z0-9.-]+", "-", model.lower()).strip("-.") or "taken-over",
        "title": f"{model} on {pair.family.label}, taken over from {pair.head.name} and {pair.worker.name}",
        "engine": pair.family.label,
        "why": "written by `sparkserve init --from-running` from two containers that served",
    }


def _parameters(values: Mapping[str, str], served: Served) -> dict[str, Any]:
    numbers = {name: int(values[name]) for name in ("context", "requests") if name in values}
    return {"model_name": values.get("model_name") or served.model, "context": _DEFAULT_CONTEXT, **numbers}


def _notes(told: Mapping[str, str], links: Mapping[Role, LinkPlace]) -> Iterator[str]:
    master = told.get("head.link.address", "")
    if master and master != links["head"].address:
        yield f"their ranks meet at {master}, which is not the head's address on the cable ({links['head'].address})"
    if not told.get("context", "").isdigit():
        yield "their arguments do not say the longest context: set `parameters.context` of the recipe to what holds"


def _launch(head: Words, worker: Words) -> dict[str, Any]:
    argv, head_argv, worker_argv = lay_together(head.argv, worker.argv)
    env, head_env, worker_env = split_env(head.env, worker.env)
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
    if theirs["stop_seconds"] != _UNSET_STOP_SECONDS:
        options["stop_seconds"] = theirs["stop_seconds"]
    if theirs["privileged"] and links["head"].hcas:
        options["devices"] = sorted({*options["devices"], _INFINIBAND})
        options["capabilities"] = sorted({*options["capabilities"], "IPC_LOCK"})
        options["ulimits"] = {"memlock": -1, **options["ulimits"]}
    return options


def _key_file(head: Running) -> tuple[str, str] | None:
    """Find the file with the API's keys that they mount: its path in the container and on the node."""
    named = {after for word, after in zip(head.words, head.words[1:], strict=False) if word == "--api-key-file"}
    named |= {value for name, value in head.env.items() if name.endswith("API_KEY_FILE")}
    return next(((mount.target, mount.source) for mount in head.mounts if mount.target in named), None)


def _mounts(pair: Pair, key_file: tuple[str, str] | None) -> Iterator[dict[str, Any]]:
    """Give every place of theirs, used where it lies; those of one rank only with that rank."""
    for rank, running in enumerate((pair.head, pair.worker)):
        other = (pair.worker, pair.head)[rank]
        for mount in running.mounts:
            if key_file and rank == 0 and mount.target == key_file[0]:
                continue
            if rank == 1 and mount in other.mounts:
                continue
            ranks = {} if mount in other.mounts else {"ranks": [rank]}
            fixed = {"writable": not mount.read_only, "must_exist": True}
            yield {"source": mount.source.replace("${", "${dollar}{"), "target": mount.target, **fixed, **ranks}


def _memory(facts: Mapping[Role, Facts]) -> dict[str, Any]:
    """Ask for a part of what was in use while they served, which was not all theirs, and for no more than they left."""
    floor = min(2.0, min(facts[role].available_bytes for role in ROLES) / _GIB / 2)
    used = max(facts[role].used_bytes for role in ROLES) / _GIB
    return {"required_gib": round(max(0.6 * used, floor), 1), "floor_gib": round(floor, 1)}
