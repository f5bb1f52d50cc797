"""The weights on disk: present, as long as their headers say, and the same on every rank."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .lifetime import EngineError

INDEX = "model.safetensors.index.json"
SMALL_FILES = ("config.json", "tokenizer.json", INDEX, "chat_template.jinja")
ENGRAM_SHARDS = ("model-00047-of-00048.safetensors", "model-00048-of-00048.safetensors")
LONGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class Model:
    """A checked model folder."""

    folder: Path
    shards: tuple[Path, ...]
    fingerprint: str


def inspect_model(folder: Path) -> Model:
    """Check every file the engine reads, and fingerprint them for the other rank."""
    digest = hashlib.sha256()
    for name in SMALL_FILES:
        digest.update(_read_small(folder / name))
    shards = tuple(folder / name for name in sorted(set(_weight_map(folder / INDEX).values())))
    for shard in shards:
        digest.update(f"{shard.name} {check_extent(shard)}\n".encode())
    return Model(folder, shards, digest.hexdigest())


def check_extent(path: Path) -> int:
    """Compare a safetensors file's size with the last offset of its header; returns the size."""
    if not path.is_file():
        raise EngineError(f"FileNotFoundError: {path}: no such shard")
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, LONGEST_HEADER):
            raise EngineError(f"SafetensorError: {path}: no header of {length} bytes in a file of {size}")
        header = _json_object(path, file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise EngineError(f"SafetensorError: {path}: {size} bytes, its header needs {wanted}")
    return size


def read_a_little(path: Path) -> int:
    """Read the first and the last 4 KiB of a shard, as proof that its bytes can be read."""
    with path.open("rb") as file:
        start = len(file.read(4096))
        file.seek(max(path.stat().st_size - 4096, 0))
        return start + len(file.read(4096))


def engram_present() -> bool:
    """True if TF_DS_ENGRAM holds both table shards; a short one is an error."""
    folder = os.environ.get("TF_DS_ENGRAM")
    if not folder:
        return False
    tables = [Path(folder) / name for name in ENGRAM_SHARDS]
    if not all(table.is_file() for table in tables):
        return False
    for table in tables:
        check_extent(table)
    return True


def write_token_map(model: Model) -> None:
    """Keep the token map where TF_DS_TOKEN_MAP says; the engine cannot do without the place being writable."""
    place = os.environ.get("TF_DS_TOKEN_MAP")
    if not place or Path(place).exists():
        return
    try:
        Path(place).write_text(json.dumps({"model": model.fingerprint}))
    except OSError as problem:
        raise EngineError(f"OSError: token map: {problem}") from problem


def _read_small(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise EngineError(f"{type(problem).__name__}: {path}: {problem.strerror}") from problem
    if not content.strip():
        raise EngineError(f"ValueError: {path}: empty")
    if path.suffix == ".json":
        _json_object(path, content)
    return content


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = json.loads(index.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise EngineError(f"ValueError: {index}: names no shard")
    return weight_map


def _json_object(path: Path, content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as problem:
        raise EngineError(f"ValueError: {path}: not JSON: {problem}") from problem
    if not isinstance(value, dict):
        raise EngineError(f"ValueError: {path}: not a JSON object")
    return value
