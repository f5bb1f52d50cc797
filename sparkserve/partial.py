"""A file that grows out of order beside its goal, with a journal of what is there and a hash that follows its front."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from sparkserve.manifest import ManifestFile
from sparkserve.node_program import new_digest

# The journal lies beside the file whose segments it lists; a partial without one grows from its start without holes.
JOURNAL_SUFFIX = ".journal"
_READ_BYTES = 1 << 20
# How far the hash runs before pages behind it are written out and dropped: a unified-memory machine must not fill up.
_DROP_BYTES = 256 << 20


def boot_id() -> str:
    """Name this boot: what a killed process wrote is still there in the same boot, and maybe not after a power cut."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Journal:
    """The finished segments of a partial file, one line each; the first `durable` of them survive a power cut."""

    def __init__(self, path: Path, header: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.segments, self._durable = _read_journal(path, header)
        lines = [header, boot_id(), *(f"segment {number}" for number in self.segments), f"durable {self._durable}"]
        beside = path.with_name(path.name + ".new")
        beside.write_text("".join(line + "\n" for line in lines), encoding="ascii")
        beside.replace(path)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def add(self, number: int) -> None:
        """Note a finished segment."""
        with self._lock:
            self.segments.append(number)
            os.write(self._descriptor, b"segment %d\n" % number)

    def note_durable(self, count: int) -> None:
        """Note that the first `count` segments are on the disk."""
        with self._lock:
            os.write(self._descriptor, b"durable %d\n" % count)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _read_journal(path: Path, header: str) -> tuple[list[int], int]:
    """Give the segments that can be trusted and how many are durable; a last line without its end does not count."""
    try:
        lines = path.read_text(encoding="ascii").split("\n")[:-1]
        if lines[:1] != [header]:
            return [], 0
        segments = [int(line.split()[1]) for line in lines[2:] if line.startswith("segment ")]
        durable = max((int(line.split()[1]) for line in lines[2:] if line.startswith("durable ")), default=0)
        return (segments if lines[1] == boot_id() else segments[:durable]), durable
    except (OSError, ValueError, IndexError):
        return [], 0


class Partial:
    """The growing file; segments may be written by many threads, each of them by one."""

    def __init__(self, path: Path, file: ManifestFile, segment_bytes: int) -> None:
        self.path, self.size, self.segment_bytes = path, file.size, segment_bytes
        self._journal_path = path.with_name(path.name + JOURNAL_SUFFIX)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or not path.exists():
            path.unlink(missing_ok=True)
            self._journal_path.unlink(missing_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._descriptor, self.size)
        self._journal = Journal(self._journal_path, f"{file.size} {file.digest} {segment_bytes}")
        self._done = set(self._journal.segments)
        self._front = 0
        self._closed = False
        self._failure: OSError | None = None
        self._changed = threading.Condition()
        self._digest = new_digest(file.algorithm, file.size)
        self._follower = threading.Thread(target=self._follow, name=f"hash of {path.name}", daemon=True)
        self._follower.start()

    @property
    def done_bytes(self) -> int:
        """Bytes of the finished segments."""
        with self._changed:
            return min(self.size, sum(self._length(number) for number in self._done))

    def missing(self) -> list[int]:
        """List the segments that are still to come."""
        with self._changed:
            return [number for number in range(-(-self.size // self.segment_bytes)) if number not in self._done]

    def _length(self, number: int) -> int:
        return min(self.segment_bytes, self.size - number * self.segment_bytes)

    def write(self, position: int, data: memoryview) -> None:
        """Write bytes; whoever writes a segment begins at its start and goes on without a gap."""
        if self._failure:  # nothing of it can be proved any more
            raise self._failure
        end = position + len(data)
        while data:
            data = data[os.pwrite(self._descriptor, data, end - len(data)) :]
        first, last = position // self.segment_bytes, end // self.segment_bytes
        finished = list(range(first, last)) + ([last] if end == self.size and end % self.segment_bytes else [])
        if finished:
            with self._changed:
                for number in set(finished) - self._done:
                    self._journal.add(number)
                    self._done.add(number)
                self._changed.notify_all()

    def _follow(self) -> None:
        """Hash behind the contiguous front, reading back from the page cache what was just written."""
        buffer = memoryview(bytearray(_READ_BYTES))
        dropped = 0
        try:
            while self._front < self.size and (ready := self._wait_ready()):
                while self._front < ready and not self._closed:
                    count = os.preadv(self._descriptor, [buffer[: min(_READ_BYTES, ready - self._front)]], self._front)
                    if not count:
                        raise OSError(errno.EIO, "became shorter while it was read")
                    self._digest.update(buffer[:count])
                    self._front += count
                if self._front - dropped >= _DROP_BYTES:
                    self._write_out()
                    dropped = self._front
        except OSError as error:
            self._failure = error
        with self._changed:
            self._changed.notify_all()

    def _wait_ready(self) -> int:
        """Wait for bytes behind the front; 0 when there will be none."""
        with self._changed:
            while not self._closed:
                number = self._front // self.segment_bytes
                while number in self._done:
                    number += 1
                ready = min(self.size, number * self.segment_bytes)
                if ready > self._front:
                    return ready
                self._changed.wait()
        return 0

    def _write_out(self) -> None:
        count = len(self._journal.segments)
        os.fdatasync(self._descriptor)
        self._journal.note_durable(count)
        os.posix_fadvise(self._descriptor, 0, self._front, os.POSIX_FADV_DONTNEED)

    def digest(self, tell: Callable[[int], None]) -> str:
        """Wait until the hash has reached the end and give it; `tell` hears how far it is, and may raise to give up."""
        while True:
            with self._changed:
                if self._failure:
                    raise self._failure
                if self._front < self.size:
                    self._changed.wait(0.2)
                if self._front == self.size:
                    return self._digest.hexdigest()
            tell(self._front)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._follower.join()
        self._journal.close()
        os.close(self._descriptor)

    def throw_away(self) -> None:
        """Remove the file and its journal, after closing: nothing in it can be told right from wrong."""
        self.path.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)
