"""What each start left behind: what was started, how long its phases took, how it ended; and what the owner wants."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import SecretStr, TypeAdapter, ValidationError

from sparkserve import state_file
from sparkserve.cluster import ROLES, Deployment, Role
from sparkserve.container import ContainerSpec
from sparkserve.engine_watch import Launch
from sparkserve.lock import Lock
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings, variable_name

_KEPT = 100
_SKIPPED = "skipped checks"
_IMAGE_ID = "image id"
Ending = Literal["under way", "answered", "failed", "interrupted", "killed"]


@dataclass(frozen=True)
class Pair:
    """What brings a pair back without the files and the network that made it."""

    specs: dict[Role, ContainerSpec]
    recipe: Recipe
    lock: Lock
    base_url: str
    model: str
    first_start: bool = False


@dataclass
class Record:
    """One start. `decided` is all that decides it, flat, so that two starts can be compared line by line.

    `pair` is a `Pair` in plain words.
    """

    run: str
    command: str
    recipe: str
    begun: float
    decided: dict[str, str]
    pair: Mapping[str, Any]
    ending: Ending = "under way"
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    error: str = ""


def open_record(command: str, deployment: Deployment, launch: Launch) -> Record:
    """Begin the record of a start."""
    settings, recipe, lock = deployment.settings, deployment.recipe, deployment.lock
    specs = {role: spec.of_run(launch.run) for role, spec in launch.specs.items()}
    made = Pair(specs, recipe, lock, launch.endpoint.base_url, launch.endpoint.model, launch.first_start)
    pair = TypeAdapter(Pair).dump_python(made, mode="json", by_alias=True)
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
    record.decided |= {f"{_IMAGE_ID} of the {role}": image for role, image in launch.images.items()}


def changed_since(record: Record, earlier: Record) -> list[str]:
    """List what decides a start and is not as it was at an earlier one; a start may end before it knows its images."""
    names = sorted(record.decided.keys() | earlier.decided.keys())
    pairs = [(name, earlier.decided.get(name, ""), record.decided.get(name, "")) for name in names]
    pairs = [(name, old, new) for name, old, new in pairs if (old and new) or not name.startswith(_IMAGE_ID)]
    return [f"{name}: {old or 'not set'} -> {new or 'not set'}" for name, old, new in pairs if old != new]


def is_same_pair(record: Record, earlier: Record) -> bool:
    """Whether two starts were of the same containers, judged by the same recipe."""
    names = ("recipe", *(f"spec of the {role}" for role in ROLES))
    return all(record.decided.get(name) == earlier.decided.get(name) for name in names)


def skipped_checks(record: Record | None) -> tuple[str, ...]:
    """Give the checks that a recorded start left out."""
    return tuple(record.decided.get(_SKIPPED, "").split()) if record else ()


def pair_of(record: Record | None) -> Pair | None:
    """Give the pair of a recorded start; none where another version of sparkserve wrote it in its own way."""
    try:
        return TypeAdapter(Pair).validate_python(record.pair) if record else None
    except ValidationError:
        return None


# -- files ------------------------------------------------------------------------------------------------------------


def save_record(runs_dir: Path, record: Record) -> None:
    """Keep a record beside the logs of its run; the oldest ones go, but for the last that answered."""
    state_file.write(runs_dir / record.run / "record.json", asdict(record))
    if old := sorted(runs_dir.glob("*/record.json"), reverse=True)[_KEPT:]:
        worked = last_answered(read_records(runs_dir))
        for path in old:
            if worked is None or path.parent.name != worked.run:
                path.unlink()


def read_records(runs_dir: Path, run: str = "*") -> list[Record]:
    """Read all records, newest first, or that of one run; one that cannot be read is left out."""
    found = (state_file.read(path) for path in sorted(runs_dir.glob(f"{run}/record.json"), reverse=True))
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


def keep_wanted(state: Path, *, serving: bool, recipe: str = "", since: float | None = None) -> None:
    """Note what the owner asked for, now or at an earlier moment."""
    wanted = Wanted(serving, recipe, time.time() if since is None else since)
    state_file.write(state / "wanted.json", asdict(wanted))


def read_wanted(state: Path) -> Wanted:
    """Read what the owner asked for; nothing where nothing was ever started."""
    try:
        return TypeAdapter(Wanted).validate_python(state_file.read(state / "wanted.json"))
    except ValidationError:  # of another version, or edited
        return Wanted()
