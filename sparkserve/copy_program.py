"""The receiving end of a copy between nodes: `PATH OFFSET SIZE ALGORITHM`; reads stdin, writes, and hashes.

Standard library only, Python 3.9 or newer: the text of this file is an argument of the node's own python3. It tells
JSON lines on stdout: `{"at"}` while it works, then one of `{"digest"}`, `{"cut"}` or `{"error"}`. It hashes what it
hands to the kernel and ends with fsync, so the digest vouches for the file as far as a program can without reading the
disk again; what was there before it began is read from the disk and hashed first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any

BLOCK = 1 << 20
DROP = 64 << 20
PATIENCE = 3.0
SILENCE = 60
F_SETPIPE_SZ = 1031  # the fcntl module names it from Python 3.10 on


def tell(**message: Any) -> None:  # noqa: ANN401 - the fields of a JSON line
    """Write one line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


class Progress:
    """Tells how far we are, a few times a second, and drops pages behind us."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.told = self.dropped = 0.0

    def at(self, position: int) -> None:
        """Note how far we are; the first call for dirty pages starts their way to the disk, a later one drops them."""
        if position - self.dropped >= DROP:
            os.posix_fadvise(self.descriptor, 0, position, os.POSIX_FADV_DONTNEED)
            self.dropped = position
        if time.monotonic() - self.told > 0.25:
            self.told = time.monotonic()
            tell(at=position)


def read_block(descriptor: int, buffer: memoryview) -> int:
    """Fill the buffer, or as much of it as there is."""
    count = 0
    while count < len(buffer):
        got = os.readv(descriptor, [buffer[count:]])
        if not got:
            break
        count += got
    return count


def write_all(descriptor: int, block: memoryview) -> None:
    """Write a block, also where the kernel takes it in pieces."""
    while block:
        block = block[os.write(descriptor, block) :]


def own_alone(descriptor: int) -> None:
    """Wait a little for an earlier copy that still winds down."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def receive(path: str, offset: int, size: int, algorithm: str) -> None:
    """Keep the first `offset` bytes that are there, add what stdin brings up to `size`, and tell the hash of all."""
    place = pathlib.Path(path)
    if place.is_symlink():
        place.unlink()
    place.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    own_alone(descriptor)
    os.ftruncate(descriptor, offset)
    digest = hashlib.sha256() if algorithm == "sha256" else hashlib.sha1(usedforsecurity=False)
    if algorithm == "git-sha1":
        digest.update(b"blob %d\0" % size)
    progress = Progress(descriptor)
    buffer = memoryview(bytearray(BLOCK))
    position = 0
    while position < size:
        source, end = (descriptor, offset) if position < offset else (0, size)
        signal.alarm(SILENCE)  # a sender behind a dead cable never ends the stream: this ends us, and frees the file
        count = read_block(source, buffer[: min(BLOCK, end - position)])
        if not count:
            return tell(cut=position)
        digest.update(buffer[:count])
        if source == 0:
            write_all(descriptor, buffer[:count])
        position += count
        progress.at(position)
    signal.alarm(0)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return tell(digest=digest.hexdigest())


def widen(descriptor: int) -> None:
    """Let a pipe hold a whole block: on a busy machine both ends wait a third less for each other."""
    with contextlib.suppress(OSError):  # no pipe, or this account has many of them
        fcntl.fcntl(descriptor, F_SETPIPE_SZ, BLOCK)


def main(argv: list[str]) -> None:
    """Receive one file."""
    widen(0)
    try:
        return receive(argv[0], int(argv[1]), int(argv[2]), argv[3])
    except OSError as error:
        return tell(error={"errno": error.errno, "text": error.strerror or str(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
