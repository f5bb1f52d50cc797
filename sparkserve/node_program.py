"""The one program that is sent to a node: it answers JSON lines with facts, file states, hashes and small file changes.

Standard library only, Python 3.9 or newer: the text of this file and of the two modules that it imports travels over
the connection and runs on the node's own python3. It ends with its standard input, so nothing stays behind when the
connection is cut. A request is `{"id", "do", ...}`; answers are `{"id", "progress"}` any number
of times, then one `{"id", "result"}` or `{"id", "error": {"kind", "text"}}`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import pathlib
import platform
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sparkserve.docker_program import docker_get, docker_logs, guard, serves
from sparkserve.search_program import search

Request = dict[str, Any]
# Read in blocks that stay in the processor's cache; dropped in whole large pages, of which none goes in parts.
BLOCK, DROP = 1 << 20, 8 << 20
_output = threading.Lock()
children: set[subprocess.Popen[str]] = set()


def send(message: dict[str, Any]) -> None:
    """Write one answer line."""
    line = json.dumps(message, separators=(",", ":")) + "\n"
    with _output:
        sys.stdout.write(line)
        sys.stdout.flush()


def hello(_request: Request) -> dict[str, Any]:
    """Say who and where we are."""
    user = pwd.getpwuid(os.getuid())
    return {
        "home": user.pw_dir,
        "user": user.pw_name,
        "uid": os.getuid(),
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
    }


# -- facts ------------------------------------------------------------------------------------------------------------


def read_text(path: str) -> str | None:
    """Read a small text file; None where it is absent or closed to us."""
    try:
        return pathlib.Path(path).read_text(errors="replace")
    except OSError:
        return None


def run(argv: list[str], timeout: float = 10) -> dict[str, Any] | None:
    """Run a tool and give its exit code and output; None where the tool is missing or gives no end."""
    pipe = subprocess.PIPE
    try:
        # Our own standard input carries the requests: a tool that reads it would take them away.
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, errors="replace")
    except OSError:
        return None
    with child:
        children.add(child)
        try:
            out, err = child.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            child.kill()
            return None
        finally:
            children.discard(child)
    return {"code": child.returncode, "out": out, "err": err}


def facts(request: Request) -> dict[str, Any]:
    """Collect the raw facts that the request names; parsing happens at home, in tested code."""
    return {
        "time": time.time(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "files": {path: read_text(path) for path in request.get("files", ())},
        "disks": {path: disk(path) for path in request.get("disks", ())},
        "commands": {name: run(argv) for name, argv in request.get("commands", {}).items()},
        "tools": {name: shutil.which(name, path=request.get("path")) for name in request.get("tools", ())},
        "globs": {pattern: read_glob(pattern) for pattern in request.get("globs", ())},
        "exist": {pattern: any(glob.iglob(pattern)) for pattern in request.get("exist", ())},
        "docker": {path: docker_get(path) for path in request.get("docker", ())},
        "ports": {str(port): port_state(port) for port in request.get("ports", ())},
    }


def disk(path: str) -> dict[str, Any]:
    """Give room and inodes of the file system that holds a path, or will hold it: its nearest existing parent."""
    place = pathlib.Path(path)
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        room = os.statvfs(place)
        device = place.stat().st_dev
    except OSError as error:
        return {"error": error.strerror}
    return {
        "place": str(place),
        "device": device,
        "free": room.f_bavail * room.f_frsize,
        "total": room.f_blocks * room.f_frsize,
        "inodes": room.f_favail if room.f_files else None,  # file systems such as btrfs have no limit
        "writable": os.access(place, os.W_OK | os.X_OK),
        "is_file": not place.is_dir(),
    }


def read_glob(pattern: str) -> dict[str, str | None]:
    """Read the small files that match a pattern; a directory gives an empty text, an unreadable file None.

    The kernel's device trees loop and hold files that block, so nothing is walked: the pattern names every level.
    """
    return {path: "" if os.path.isdir(path) else read_text(path) for path in sorted(glob.glob(pattern))}


def port_state(port: int) -> str:
    """Try whether a TCP port is free on all addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - bound for a moment to learn whether it is free, never listened on
        except OSError as error:
            return error.strerror or str(error)
    return "free"


# -- files and hashes -------------------------------------------------------------------------------------------------


def identity(found: os.stat_result) -> list[int]:
    """Give what changes with a file's bytes, also when size and mtime were put back: ctime cannot be."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


class Remembered:
    """Hashes seen on this node, by path and identity, in one JSON file that is replaced as a whole."""

    def __init__(self, path: str) -> None:
        self.path = path

    def load(self) -> dict[str, Any]:
        """Read all; an unreadable store is an empty one, since everything in it can be computed again."""
        try:
            with open(self.path) as store:
                found = json.load(store)
        except (OSError, ValueError):
            return {}
        return {path: row for path, row in found.items() if isinstance(row, dict)} if isinstance(found, dict) else {}

    def get(self, store: dict[str, Any], path: str, found: os.stat_result, algorithm: str) -> str | None:
        """Give the hash of a file that has not changed since it was hashed."""
        known = store.get(path, {})
        return known.get("digest") if (known.get("is"), known.get("by")) == (identity(found), algorithm) else None

    def add(self, path: str, found: os.stat_result, algorithm: str, digest: str, **more: bool) -> None:
        """Remember one hash, and `own` for what is of our making; other threads and other programs wait."""
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(f"{self.path}.lock", "w") as alone:
            fcntl.flock(alone, fcntl.LOCK_EX)
            store = self.load()
            store[path] = {**store.get(path, {}), "is": identity(found), "by": algorithm, "digest": digest, **more}
            beside = f"{self.path}.{os.getpid()}"
            with open(beside, "w") as new:
                json.dump(store, new)
                new.flush()
                os.fsync(new.fileno())
            os.replace(beside, self.path)


@contextlib.contextmanager
def turn(store: str, tell: Callable[[], None]) -> Iterator[None]:
    """Hold what only one reader of this node has, of all programs: whoever is killed gives it back.

    It is a lock on the store's directory, or on the nearest one above: nothing has to be written for it.
    """
    with contextlib.suppress(OSError):
        os.makedirs(os.path.dirname(store), exist_ok=True)
    with contextlib.ExitStack() as held:
        for place in pathlib.Path(store).parents:
            with contextlib.suppress(OSError):  # closed to us, no directory, or a file system without locks
                descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
                held.callback(os.close, descriptor)
                while not locked(descriptor):
                    tell()  # who says nothing for long is given up
                    time.sleep(0.1)
                break
        yield


def locked(descriptor: int) -> bool:
    """Take the lock of an open file, if nobody has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def file_state(path: str) -> tuple[str, os.stat_result | None]:
    """Look at a path without following a link in its last part."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return "missing", None
    except OSError:
        return "unreadable", None
    if stat.S_ISLNK(found.st_mode):
        return "link", found
    if not stat.S_ISREG(found.st_mode):
        return "other", found
    return ("file" if os.access(path, os.R_OK) else "unreadable"), found


def look(request: Request) -> dict[str, Any]:
    """Tell kind, size and remembered hash of files: `{"store", "files": [{"path", "algorithm"}]}`."""
    memory = Remembered(request["store"])
    store = memory.load()
    answer = {}
    for file in request["files"]:
        path = file["path"]
        kind, found = file_state(path)
        row: dict[str, Any] = {"kind": kind, "size": found.st_size if found else 0, "digest": None}
        if found is not None and kind == "file":
            row["digest"] = memory.get(store, path, found, file["algorithm"])
            row["blocks"] = found.st_blocks * 512
        answer[path] = row
    return answer


def new_digest(algorithm: str, size: int) -> hashlib._Hash:
    """Begin the hash of a file of this size: sha256, or git's own, which begins with the size."""
    if algorithm == "sha256":
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def hash_file(path: str, algorithm: str, tell: Callable[[int], None]) -> tuple[os.stat_result, str]:
    """Hash a file and drop its pages behind the reader: a unified-memory machine must not fill up with page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        digest = new_digest(algorithm, found.st_size)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffer = memoryview(bytearray(BLOCK))
        done = 0
        while count := os.readv(descriptor, [buffer]):
            digest.update(buffer[:count])
            done += count
            if done % DROP == 0:
                os.posix_fadvise(descriptor, done - DROP, DROP, os.POSIX_FADV_DONTNEED)
            tell(count)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if identity(os.fstat(descriptor)) != identity(found):
            raise OSError(0, "changed while it was read")
        return found, digest.hexdigest()
    finally:
        os.close(descriptor)


def hash_files(request: Request, tell: Callable[[dict[str, int]], None]) -> dict[str, Any]:
    """Hash files side by side, largest first; beside an engine one by one. Path to `{"kind", "size", "digest"}`."""
    memory = Remembered(request["store"])
    done, told = [0], [0.0]
    counting = threading.Lock()
    os.nice(19)  # of this thread and those that it makes: others may serve where no engine of ours does

    def count(size: int) -> None:
        with counting:
            done[0] += size
            now = time.monotonic()
            if now - told[0] < 0.2:
                return
            told[0] = now
        tell({"bytes": done[0]})

    def one(file: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        path, algorithm = file["path"], file["algorithm"]
        kind, _ = file_state(path)
        if kind != "file":
            return path, {"kind": kind, "size": 0, "digest": None}
        try:
            with turn(memory.path, lambda: count(0)) if serves() else contextlib.nullcontext():
                found, digest = hash_file(path, algorithm, count)
        except OSError as error:
            return path, {"kind": "unreadable", "size": 0, "digest": None, "error": error.strerror}
        with contextlib.suppress(OSError):  # what cannot be remembered is proved all the same
            memory.add(path, found, algorithm, digest)
        return path, {"kind": "file", "size": found.st_size, "digest": digest}

    files = sorted(request["files"], key=lambda file: -file.get("size", 0))
    # One more than there are cores: a hash that is being remembered waits for the disk.
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)) + 1) as pool:
        return dict(pool.map(one, files))


def make_directories(request: Request) -> dict[str, Any]:
    """Make directories and their parents; an existing one is fine."""
    for path in request["paths"]:
        os.makedirs(path, mode=request.get("mode", 0o755), exist_ok=True)
    return {}


def flush(path: str) -> None:
    """Write a file or the entries of a directory out, and drop its pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def settle(request: Request) -> dict[str, Any]:
    """Give a finished partial file its name: durable first, then visible; the hash must have been right before."""
    source, target = request["source"], request["target"]
    flush(source)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(target):
        os.unlink(target)
    os.replace(source, target)
    pathlib.Path(request["journal"]).unlink(missing_ok=True)
    flush(os.path.dirname(target))
    found = os.lstat(target)
    if request.get("digest"):
        Remembered(request["store"]).add(target, found, request["algorithm"], request["digest"], own=True)
    return {"size": found.st_size}


def remove(request: Request) -> dict[str, Any]:
    """Remove files that are ours; an absent one is fine."""
    for path in request["paths"]:
        pathlib.Path(path).unlink(missing_ok=True)
    return {}


ACTIONS: dict[str, Callable[[Request], Any]] = {
    "hello": hello,
    "facts": facts,
    "docker_logs": docker_logs,
    "guard": guard,
    "look": look,
    "search": search,
    "serves": lambda _request: serves(),
    "mkdir": make_directories,
    "settle": settle,
    "remove": remove,
}


def answer(request: Request) -> None:
    """Carry out one request and send its end."""
    number = request["id"]
    try:
        if request["do"] == "hash":
            result = hash_files(request, lambda progress: send({"id": number, "progress": progress}))
        else:
            result = ACTIONS[request["do"]](request)
        send({"id": number, "result": result})
    except OSError as error:
        text = f"{error.filename or request['do']}: {error.strerror or error}"
        send({"id": number, "error": {"kind": type(error).__name__, "errno": error.errno, "text": text}})
    except Exception as error:  # noqa: BLE001 - it travels home, where it is raised again
        send({"id": number, "error": {"kind": type(error).__name__, "errno": None, "text": repr(error)}})


def main() -> None:
    """Answer requests until standard input ends."""
    for line in sys.stdin.buffer:
        threading.Thread(target=answer, args=(json.loads(line),), daemon=True).start()


if __name__ == "__main__":
    main()
    os._exit(0)
