"""What each start left behind: what was started, how long its phases took, how it ended; and what the owner wants."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import SecretStr, TypeAdapter

from sparkserve import state_file
from sparkserve.cluster import Deployment, Role
from sparkserve.container import ContainerSpec
from sparkserve.endpoint import Endpoint
from sparkserve.engine_watch import Launch
from sparkserve.lock import Lock
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings, variable_name

_KEPT = 100
_SKIPPED = "skipped checks"
Ending = Literal["under way", "answered", "failed", "interrupted"]


@dataclass
class Record:
    """One start. `decided` is all that decides it, flat, so that two starts can be compared line by line.

    `pair` holds what brings the same pair back without the files and the network that made it: both specs, the recipe,
    the lock and the address.
    """

    run: str
    command: str
    recipe: str
    begun: float
    decided: Mapping[str, str]
    pair: Mapping[str, Any]
    ending: Ending = "under way"
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    error: str = ""


def open_record(command: str, deployment: Deployment, launch: Launch) -> Record:
    """Begin the record of a start."""
    settings, recipe, lock = deployment.settings, deployment.recipe, deployment.lock
    pair = {
        "specs": {role: asdict(spec.of_run(launch.run)) for role, spec in launch.specs.items()},
        "recipe": recipe.model_dump(mode="json", by_alias=True),
        "lock": lock.model_dump(mode="json", by_alias=True),
        "address": {"base_url": launch.endpoint.base_url, "model": launch.endpoint.model},
    }
    decided = {**_settings_of(settings), **_sources_of(lock)}
    decided["recipe"] = f"{recipe.name} {hashlib.sha256(json.dumps(pair['recipe']).encode()).hexdigest()[:12]}"
    decided["image"] = launch.specs["head"].image
    decided |= {f"spec of the {role}": spec.digest[7:19] for role, spec in launch.specs.items()}
    decided |= {f"kernel of the {role}": kernel for role, kernel in launch.kernels.items()}
    decided |= {_SKIPPED: " ".join(launch.skipped_checks)} if launch.skipped_checks else {}
    return Record(launch.run, command, settings.recipe, time.time(), decided, pair)


def _settings_of(settings: Settings) -> dict[str, str]:
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    kept = {name: value for name, value in values.items() if value not in (None, "", ())}
    return {variable_name(name): str(value) for name, value in kept.items() if not isinstance(value, SecretStr)}


def _sources_of(lock: Lock) -> dict[str, str]:
    found = {manifest.repository: manifest.commit for manifest in lock.weights}
    if lock.chat_template:
        found["chat template"] = f"{lock.chat_template.repository}@{lock.chat_template.commit}"
    image = lock.image
    return found | {"engine": image.engine_commit, "base image": image.base, "finished image": image.reference}


def close_record(record: Record, ending: Ending, launch: Launch, error: str = "") -> None:
    """Note how a start ended and when each phase was first seen."""
    record.ending, record.error = ending, error
    record.seconds = round(time.time() - record.begun, 3)
    record.phases = {name: round(seconds, 3) for name, seconds in launch.phases.items()}


def changed_since(record: Record, earlier: Record) -> list[str]:
    """List what decides a start and is not as it was at an earlier one."""
    names = sorted(record.decided.keys() | earlier.decided.keys())
    pairs = [(name, earlier.decided.get(name, ""), record.decided.get(name, "")) for name in names]
    return [f"{name}: {old or 'not set'} -> {new or 'not set'}" for name, old, new in pairs if old != new]


def skipped_checks(record: Record | None) -> tuple[str, ...]:
    """Give the checks that a recorded start left out."""
    return tuple(record.decided.get(_SKIPPED, "").split()) if record else ()


def specs_of(record: Record) -> dict[Role, ContainerSpec]:
    """Give the containers of a recorded start."""
    return TypeAdapter(dict[Role, ContainerSpec]).validate_python(record.pair["specs"])


def recipe_of(record: Record) -> Recipe:
    """Give the recipe of a recorded start."""
    return Recipe.model_validate(record.pair["recipe"])


def lock_of(record: Record) -> Lock:
    """Give the lock of a recorded start."""
    return Lock.model_validate(record.pair["lock"])


def address_of(record: Record, api_key: SecretStr | None) -> Endpoint:
    """Give the API of a recorded start."""
    return Endpoint(record.pair["address"]["base_url"], record.pair["address"]["model"], api_key)


# -- files ------------------------------------------------------------------------------------------------------------


def save_record(runs_dir: Path, record: Record) -> None:
    """Keep a record beside the logs of its run; the oldest ones go."""
    state_file.write(runs_dir / record.run / "record.json", asdict(record))
    for old in sorted(runs_dir.glob("*/record.json"), reverse=True)[_KEPT:]:
        old.unlink()


def read_records(runs_dir: Path) -> list[Record]:
    """Read all records, newest first; one that cannot be read is left out."""
    found = (state_file.read(path) for path in sorted(runs_dir.glob("*/record.json"), reverse=True))
    known = set(Record.__dataclass_fields__)
    return [Record(**raw) for raw in found if raw.keys() == known]


def last_answered(records: Sequence[Record], run: str = "") -> Record | None:
    """Find the newest start that answered; with `run`, that one if it did."""
    return next((one for one in records if one.ending == "answered" and run in ("", one.run)), None)


@dataclass(frozen=True)
class Wanted:
    """What the owner's last `start` or `stop` asked for; `recipe` as it was named then."""

    serving: bool = False
    recipe: str = ""
    since: float = 0.0


def keep_wanted(state: Path, *, serving: bool, recipe: str = "") -> None:
    """Note what the owner asked for."""
    state_file.write(state / "wanted.json", asdict(Wanted(serving, recipe, time.time())))


def read_wanted(state: Path) -> Wanted:
    """Read what the owner asked for; nothing where nothing was ever started."""
    return Wanted(**state_file.read(state / "wanted.json"))
