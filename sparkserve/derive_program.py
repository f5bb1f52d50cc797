"""Reads tensors out of safetensors files by their offsets and writes them as one file, on the node that has them.

Standard library only, Python 3.9 or newer: the text of this file is an argument of the node's own python3, the order
(JSON) the next one. It tells JSON lines on stdout: `{"done", "total"}` while it works, then `{"error"}` or `{"tensors",
"size"}`. The file gets its name only when it is whole and on the disk.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import struct
import sys
from typing import Any

BLOCK = 8 << 20
LONGEST_HEADER = 100 << 20
Order = dict[str, Any]


class Unfit(Exception):
    """The files are not what the order expects."""


def tell(**message: Any) -> None:  # noqa: ANN401 - the fields of a JSON line
    """Write one line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def read_header(path: str) -> tuple[dict[str, Any], int]:
    """Read the header of a safetensors file: tensors by name, and where their bytes begin."""
    size = pathlib.Path(path).stat().st_size
    with pathlib.Path(path).open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise Unfit(f"{path} is no safetensors file")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError as error:
            raise Unfit(f"{path} is no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= size - 8 - length:
            raise Unfit(f"{path}: the tensor {name} ends behind the file")
    return header, 8 + length


def find_tensors(order: Order) -> list[tuple[str, str, dict[str, Any], int]]:
    """Find, for each pattern and layer, the one tensor: its name, its file, its entry, where its file's data begin."""
    every = []
    for path in order["sources"]:
        header, begin = read_header(path)
        every += [(name, path, entry, begin) for name, entry in header.items()]
    found, missing = [], []
    first, last = order["layers"]
    for layer in range(first, last + 1):
        for pattern in order["tensors"]:
            wanted = re.compile(pattern.replace("LAYER", str(layer)))
            fits = [item for item in every if wanted.fullmatch(item[0])]
            if len(fits) == 1:
                found += fits
            else:
                missing.append(f"{len(fits)} of {wanted.pattern}")
    if missing:
        known = ", ".join(sorted({re.sub(r"\d+", "N", item[0]) for item in every})[:40])
        raise Unfit(f"needed one tensor each, found {'; '.join(missing[:4])} …; the files hold: {known}")
    wrong = [f"{name} is {entry['dtype']}" for name, _, entry, _ in found if order["dtype"] not in ("", entry["dtype"])]
    if wrong:
        raise Unfit(f"{wrong[0]}; needed: {order['dtype']}")
    return found


def write(order: Order) -> None:
    """Write the wanted tensors, in the order of layers, to a hidden file that then takes its name."""
    found = find_tensors(order)
    header, position = {}, 0
    for name, _, entry, _ in found:
        begin, end = entry["data_offsets"]
        header[name] = {**entry, "data_offsets": [position, position + end - begin]}
        position += end - begin
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    target = pathlib.Path(order["target"])
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    done = 0
    with partial.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, path, entry, data in found:
            begin, end = entry["data_offsets"]
            done += copy_range(path, data + begin, end - begin, out)
            tell(done=done, total=position)
        out.flush()
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = out.tell()
    partial.replace(target)
    tell(tensors=len(found), size=size)


def copy_range(path: str, begin: int, size: int, out: Any) -> int:  # noqa: ANN401 - a binary file
    """Copy bytes of a file, and drop their pages behind us."""
    with pathlib.Path(path).open("rb", buffering=0) as file:
        left, position = size, begin
        while left:
            block = os.pread(file.fileno(), min(BLOCK, left), position)
            if not block:
                raise Unfit(f"{path} ended while it was read")
            out.write(block)
            left -= len(block)
            position += len(block)
        os.posix_fadvise(file.fileno(), begin, size, os.POSIX_FADV_DONTNEED)
    return size


def main() -> None:
    """Carry out the order that is our one argument."""
    try:
        write(json.loads(sys.argv[1]))
    except (Unfit, OSError) as error:
        tell(error=str(error))


if __name__ == "__main__":
    main()
