"""The control file: what the lab scripts this rank to do, read again whenever the file changes."""

import json
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .log import tag

PLACES = ("before_rendezvous", "loading", "after_ready")
CHOICES = {"completions": ("ok", "fail", "hang", "garbage"), "health": ("ok", "fail")}


class ControlError(ValueError):
    """The control file says something this engine does not know."""


@dataclass(frozen=True)
class Fault:
    """Where a rank exits or hangs."""

    at: str
    rank: int | None = None
    code: int = 1
    log: tuple[str, ...] = ()
    after_seconds: float = 0.0


@dataclass(frozen=True)
class Line:
    """A log line to inject."""

    line: str
    at: str = "loading"


@dataclass(frozen=True)
class Script:
    """Every key of the control file, with what holds where the file is silent."""

    load_seconds_first: float = 2.0
    load_seconds_later: float = 0.5
    prefill_tokens_per_second: float = 40_000.0
    decode_tokens_per_second: float = 400.0
    exit_at: Fault | None = None
    hang_at: Fault | None = None
    ignore_sigterm: bool = False
    completions: str = "ok"
    stalled: bool = False
    wrong_model_name: str = ""
    health: str = "ok"
    degraded: bool = False
    no_http: bool = False
    log_lines: tuple[Line, ...] = ()
    meminfo_gib: float = 99.0
    rank_cache_bytes: int = 1 << 20
    rendezvous_timeout_seconds: float = 600.0
    heartbeat_seconds: float = 30.0


class Control:
    """The control file of one rank; `now` is always what the file says now."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._script = Script()
        self._refresh()

    @property
    def now(self) -> Script:
        """The script as it is at this moment; a file that cannot be read changes nothing and is reported once."""
        with self._lock:
            try:
                self._refresh()
            except ControlError as problem:
                tag(f"control file ignored: {problem}")
            return self._script

    def _refresh(self) -> None:
        seen = self._signature()
        if seen == self._seen:
            return
        self._seen = seen
        self._script = parse(self._path.read_text(), self._rank) if seen else Script()

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


def parse(text: str, rank: int) -> Script:
    """Turn the file's text into this rank's script; values under `ranks` win over the common ones."""
    try:
        data = json.loads(text)
    except ValueError as problem:
        raise ControlError(f"not JSON: {problem}") from problem
    if not isinstance(data, dict):
        raise ControlError("must be a JSON object")
    own = data.pop("ranks", {}).get(str(rank), {})
    merged = {**data, **own}
    defaults = {field.name: field.default for field in fields(Script)}
    unknown = sorted(merged.keys() - defaults.keys())
    if unknown:
        raise ControlError(f"unknown key {', '.join(unknown)}")
    return Script(**{name: _value(name, given, defaults[name]) for name, given in merged.items()})


def _value(name: str, given: Any, default: Any) -> Any:
    if name in {"exit_at", "hang_at"}:
        return None if given is None else _fault(name, given)
    if name == "log_lines":
        return tuple(_line(entry) for entry in _typed(name, given, list))
    if isinstance(default, float) and type(given) is int:
        return float(given)
    value = _typed(name, given, type(default))
    if name in CHOICES and value not in CHOICES[name]:
        raise ControlError(f"{name} must be one of {', '.join(CHOICES[name])}, not {value!r}")
    return value


def _typed(name: str, given: Any, kind: type) -> Any:
    if type(given) is not kind:
        raise ControlError(f"{name} must be {kind.__name__}, not {given!r}")
    return given


def _fault(name: str, given: Any) -> Fault:
    known = _known(name, given, {"at", "rank", "code", "log", "after_seconds"})
    log = known.get("log", ())
    return Fault(
        **{**known, "at": _place(name, known.get("at")), "log": (log,) if isinstance(log, str) else tuple(log)}
    )


def _line(given: Any) -> Line:
    if isinstance(given, str):
        return Line(given)
    known = _known("log_lines", given, {"line", "at"})
    return Line(_typed("line", known.get("line"), str), _place("log_lines", known.get("at", "loading")))


def _known(name: str, given: Any, keys: set[str]) -> dict[str, Any]:
    known: dict[str, Any] = _typed(name, given, dict)
    if unknown := sorted(known.keys() - keys):
        raise ControlError(f"{name}: unknown key {', '.join(unknown)}")
    return known


def _place(name: str, given: Any) -> str:
    if given not in PLACES:
        raise ControlError(f"{name}: at must be one of {', '.join(PLACES)}, not {given!r}")
    return str(given)
