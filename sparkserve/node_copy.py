"""One file from a node to the other over the link: resumed after a cut, and hashed where it arrives.

The sending end on this machine is the open file itself, given to ssh as its stdin: no byte passes through Python here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sparkserve import copy_program
from sparkserve.cluster import Node
from sparkserve.errors import SparkserveError, disk_error
from sparkserve.hosts import LocalHost
from sparkserve.manifest import ManifestFile
from sparkserve.partial import JOURNAL_SUFFIX
from sparkserve.plan import Work
from sparkserve.ssh_host import SshHost

_POLL_SECONDS = 0.25
_DROP_BYTES = 64 << 20
_PROGRESS_BYTES = 1 << 20
# What ssh says when another try would say the same.
_FINAL_WORDS = ("Permission denied", "Host key verification failed", "IDENTIFICATION HAS CHANGED", "no matching")


@dataclass(frozen=True)
class CopyLimits:
    """How patient a copy is, in seconds; `tries` counts failures in a row without progress."""

    stall_seconds: float = 60.0
    tries: int = 6
    first_wait: float = 2.0
    longest_wait: float = 30.0


@dataclass(frozen=True)
class Copy:
    """What goes where: `partial` is the hidden file at the target that grows; renaming it is the caller's."""

    source: Node
    source_path: str
    target: Node
    partial: str
    file: ManifestFile
    limits: CopyLimits = CopyLimits()

    @property
    def remote(self) -> Node:
        """The end that ssh reaches."""
        return self.source if self.target.role == "head" else self.target


class _Cut(Exception):
    """The stream ended early; `position` is what had arrived."""

    def __init__(self, reason: str, position: int) -> None:
        super().__init__(reason)
        self.position = position


def copy(job: Copy, work: Work) -> None:
    """Bring the file to the target's partial until its hash there is right; wrong content is copied once more."""
    for _ in range(2):
        observed = _copy_whole(job, work)
        if observed == job.file.digest:
            return
        job.target.session.ask("remove", paths=[job.partial])
        work.note("wrong content: copying it once more from the start")
    raise SparkserveError(
        "wrong_content",
        f"{job.file.path} arrived twice with {job.file.algorithm} {observed}; needed: {job.file.digest}",
        f"the file on the {job.source.role} may have changed: `sparkserve weights verify --full --repair`",
        job.target.role,
    )


def _copy_whole(job: Copy, work: Work) -> str:
    """Try until everything has arrived, and give the hash that the target observed."""
    failures = 0
    while True:
        offset = _resume_point(job)
        try:
            with _Stream(job, offset, "" if failures else job.remote.host.take_login()) as stream:
                return stream.run(work)
        except _Cut as cut:
            failures = 1 if cut.position - offset >= _PROGRESS_BYTES else failures + 1
            if failures >= job.limits.tries or any(word in str(cut) for word in _FINAL_WORDS):
                raise _gave_up(job, failures, str(cut)) from cut
            work.note(f"the stream broke ({str(cut).splitlines()[-1]}); going on from {cut.position >> 20} MiB")
            _sleep(min(job.limits.longest_wait, job.limits.first_wait * float(1 << (failures - 1))), work)


def _sleep(seconds: float, work: Work) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        work.check()
        time.sleep(min(left, _POLL_SECONDS))


def _resume_point(job: Copy) -> int:
    """Give how much the target holds from its start; a partial of the downloader has holes and is no such start."""
    journal = job.partial + JOURNAL_SUFFIX
    files = [{"path": path, "algorithm": job.file.algorithm} for path in (job.partial, journal)]
    rows = job.target.session.ask("look", store=job.target.proofs_file, files=files)
    if rows[journal]["kind"] != "missing":
        job.target.session.ask("remove", paths=[job.partial, journal])
        return 0
    row = rows[job.partial]
    return row["size"] if row["kind"] == "file" and row["size"] <= job.file.size else 0


def _gave_up(job: Copy, failures: int, reason: str) -> SparkserveError:
    node, address = job.remote, job.remote.link_address or "its ssh address"
    destination = node.host.target.destination if isinstance(node.host, SshHost) else node.role
    return SparkserveError(
        "copy_failed",
        f"the copy of {job.file.path} over the link ({address}) broke {failures} times: {reason.splitlines()[-1]}",
        f"look at the cable; by hand: ssh -o HostName={address} {destination} true; then run the same command again",
        "worker",
        reason,
    )


class _Stream:
    """The processes of one attempt: (the sender,) and the receiver, which tells how far it is."""

    def __init__(self, job: Copy, offset: int, login: str) -> None:
        self._job = job
        self._login = login
        self._position = offset
        self._dropped = offset
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the stream
        self._processes: list[subprocess.Popen[bytes]] = []
        self._file: int | None = None
        program = Path(copy_program.__file__).read_text(encoding="utf-8")
        words = (job.partial, str(offset), str(job.file.size), job.file.algorithm)
        try:
            source = self._open_source(offset)
            self._receiver = self._start(job.target, [job.target.host.python, "-I", "-c", program, *words], source)
        except BaseException:
            self.close()
            raise

    def _open_source(self, offset: int) -> int | IO[bytes]:
        job = self._job
        if not isinstance(job.source.host, LocalHost):
            words = [f"if={job.source_path}", f"skip={offset}", "iflag=skip_bytes,nofollow,nocache", "bs=1M"]
            return _stdout(self._start(job.source, ["dd", "status=none", *words], subprocess.DEVNULL))
        try:
            self._file = os.open(job.source_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            text = f"cannot read {job.source_path}: {error.strerror}"
            hint = "`sparkserve weights verify` tells what is there, with --repair it fetches what is not"
            raise SparkserveError("source_unreadable", text, hint, job.source.role) from error
        os.lseek(self._file, offset, os.SEEK_SET)
        return self._file

    def _start(self, node: Node, argv: list[str], stdin: int | IO[bytes]) -> subprocess.Popen[bytes]:
        gently = ["nice", "-n", "19"] if node.session.ask("serves") else []
        argv = node.host.bulk_argv([*gently, *argv], node.link_address, self._login)
        # A session of its own: Ctrl-C reaches it through us only.
        process = subprocess.Popen(
            argv, stdin=stdin, stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True
        )
        self._processes.append(process)
        return process

    def run(self, work: Work) -> str:
        """Follow the receiver to its end and give the hash that it observed."""
        pipe = _stdout(self._receiver).fileno()
        pending, heard = b"", time.monotonic()
        while True:
            readable, _, _ = select.select([pipe], [], [], _POLL_SECONDS)
            work.check()
            if not readable:
                if time.monotonic() - heard > self._job.limits.stall_seconds:
                    raise _Cut(f"nothing moved for {self._job.limits.stall_seconds:g} s", self._position)
                continue
            data, heard = os.read(pipe, 65536), time.monotonic()
            *lines, pending = (pending + data).split(b"\n")
            for message in filter(None, map(_parse, lines)):
                if "digest" in message:
                    self._job.remote.host.give_login_back(self._login)
                    return str(message["digest"])
                self._take(message, work)
            if not data:
                raise _Cut(self._last_words() or "the connection ended", self._position)

    def _take(self, message: dict[str, Any], work: Work) -> None:
        if "error" in message:
            number, reason = message["error"]["errno"], message["error"]["text"]
            if number == errno.EAGAIN:  # an earlier receiver has not noticed yet that nobody sends to it any more
                raise _Cut("an earlier copy still holds the partial file", self._position)
            text = f"cannot write {self._job.partial} ({self._job.file.size} bytes in all): {reason}"
            raise disk_error(number, text, self._job.target.role, "copy_failed")
        if "cut" in message:
            raise _Cut(self._last_words() or "the connection ended", int(message["cut"]))
        self._position = int(message["at"])
        work.progress(self._position, self._job.file.size)
        self._drop_behind()

    def _drop_behind(self) -> None:
        """Drop the pages that ssh has read: its stdin shares our file position."""
        if self._file is not None:
            read = os.lseek(self._file, 0, os.SEEK_CUR)
            if read - self._dropped >= _DROP_BYTES:
                os.posix_fadvise(self._file, self._dropped, read - self._dropped, os.POSIX_FADV_DONTNEED)
                self._dropped = read

    def _last_words(self) -> str:
        """Wait for ssh to end and give what it said."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()[-2000:]

    def close(self) -> None:
        """End what still runs and free everything; pages of the source that were read are dropped."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _stdout(process).close()
        if self._file is not None:
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(self._file)
        self._errors.close()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stdout(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdout is None:
        raise AssertionError("Popen was asked for a pipe")
    return process.stdout


def _parse(line: bytes) -> dict[str, Any] | None:
    """Read one line of the receiver; anything else was said by the account's shell and is left out."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
