"""API keys from a file that only its owner may read."""

import hmac
from pathlib import Path

from .lifetime import EngineError


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The keys of the file, one a line, each with or without a label; none without a file."""
    if path is None:
        return ()
    try:
        mode, lines = path.stat().st_mode, path.read_text().splitlines()
    except OSError as problem:
        raise EngineError(f"ValueError: API key file {path}: {problem.strerror}") from problem
    if mode & 0o077:
        raise EngineError(f"ValueError: API key file {path} may be read by others (mode {mode & 0o777:04o}); use 0600")
    keys = tuple(line.rpartition(": ")[2].strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise EngineError(f"ValueError: API key file {path} holds no key")
    return keys


def allowed(keys: tuple[str, ...], authorization: str | None) -> bool:
    """True if the request carries one of the keys, or none is needed."""
    given = (authorization or "").removeprefix("Bearer ").encode()
    return not keys or any(hmac.compare_digest(given, key.encode()) for key in keys)
