"""What the node program asks of its Docker engine: facts, logs, whether we serve, and the memory guard of a start.

Standard library only, Python 3.9 or newer: it is sent to a node with `node_program`, which imports it.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import pathlib
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]


class DockerConnection(http.client.HTTPConnection):
    """HTTP over the Docker engine's socket."""

    def __init__(self, path: str) -> None:
        super().__init__("docker", timeout=15)
        self._path = path

    def connect(self) -> None:
        """Open the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def docker_get(path: str, read: Callable[[Any], dict[str, Any]] | None = None, method: str = "GET") -> dict[str, Any]:
    """Ask the Docker engine; gives `status` and `body`, or `error`: missing, refused, permission, timeout, failed."""
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    connection = DockerConnection(address[len("unix://") :] if address.startswith("unix://") else address)
    kinds: Any = {FileNotFoundError: "missing", ConnectionRefusedError: "refused", PermissionError: "permission"}
    try:
        connection.request(method, path)
        response = connection.getresponse()
        if read and response.status == 200:
            return read(response)
        return {"status": response.status, "body": json.loads(response.read() or b"null")}
    except (OSError, http.client.HTTPException, ValueError) as error:
        return {"error": kinds.get(type(error), "timeout" if isinstance(error, TimeoutError) else "failed")}
    finally:
        connection.close()


def docker_logs(request: Request) -> dict[str, Any]:
    """Read a container's log from a moment on, about `limit` bytes of it: `lines` of `[time, text]`, oldest first."""
    query = {name: request[name] for name in ("since", "tail") if request.get(name)}
    words = urllib.parse.urlencode({"stdout": 1, "stderr": 1, "timestamps": 1, **query})
    limit = request.get("limit", 4 << 20)
    return docker_get(f"/containers/{request['container']}/logs?{words}", lambda stream: read_frames(stream, limit))


def read_frames(stream: Any, limit: int) -> dict[str, Any]:  # noqa: ANN401 - anything with read()
    """Take Docker's frames apart: 8 bytes of header (stream, 3 zeros, size), then one line or a part of a long one."""
    lines: list[list[str]] = []
    size = 0
    is_open = False
    while (size <= limit or is_open) and (header := stream.read(8)):
        frame = stream.read(int.from_bytes(header[4:8], "big")).decode(errors="replace")
        moment, _, text = frame.partition(" ")
        if is_open:
            lines[-1][1] += text.rstrip("\n")
        else:
            lines.append([moment, text.rstrip("\n")])
        is_open = not text.endswith("\n")
        size += len(frame)
    return {"status": 200, "lines": lines, "more": size > limit, "time": time.time()}


def serves() -> bool:
    """Whether an engine of ours runs here, which must not be disturbed; asked often, and looked up twice a second."""
    return _serves(int(time.monotonic() * 2))


@functools.lru_cache(maxsize=1)
def _serves(_moment: int) -> bool:
    """Look; a Docker that is silent may have one."""
    words = urllib.parse.urlencode({"filters": json.dumps({"label": ["sparkserve.owner=sparkserve"]})})
    found = docker_get(f"/containers/json?{words}")
    return bool(found.get("body")) or found.get("error") in ("timeout", "failed")


class Guard(threading.Thread):
    """Kills a container before its machine hangs for want of memory; it needs no word from home to do so."""

    def __init__(self, container: str, floor: int) -> None:
        super().__init__(daemon=True)
        self.container = container
        self.floor = floor
        self.killed_at: int | None = None

    def run(self) -> None:
        """Look every 0.2 s; two looks in a row below the floor are the end, and it is tried until Docker obeys."""
        low = 0
        while True:
            available = available_bytes()
            low = low + 1 if available < self.floor else 0
            if low >= 2:
                self.killed_at = self.killed_at or available
                if docker_get(f"/containers/{self.container}/kill", method="POST").get("status") in (204, 404, 409):
                    return
            time.sleep(0.2)


def available_bytes() -> int:
    """Give MemAvailable; a machine that does not tell it has all that one can ask for."""
    words = pathlib.Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()
    return int(words[0]) * 1024 if words else sys.maxsize


_guards: dict[str, Guard] = {}
_guarding = threading.Lock()


def guard(request: Request) -> dict[str, Any]:
    """Watch over a container from now until we end; tells the MemAvailable at which it had to be killed."""
    with _guarding:
        name = request["container"]
        if name not in _guards:
            _guards[name] = Guard(name, request["floor"])
            _guards[name].start()
        return {"killed_at": _guards[name].killed_at}
