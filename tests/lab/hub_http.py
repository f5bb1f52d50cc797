"""Requests and answers of the hub's two servers, and the log of what was served."""

import json
import threading
import time
from dataclasses import asdict, dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from tests.lab.hub_faults import Fault, FaultBook, Json, Span


@dataclass
class Record:
    """One served request, as the log shows it; `bytes_sent` counts body bytes and grows while they leave."""

    method: str
    host: str
    path: str
    query: str
    range: str | None
    had_token: bool
    client: str
    time: float = field(default_factory=time.time)
    status: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0
    done: bool = False
    faults: list[str] = field(default_factory=list)


class RequestLog:
    """All requests so far, in the order of their arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[Record] = []

    def add(self, record: Record) -> None:
        """Note a request as soon as it has arrived."""
        with self._lock:
            self._records.append(record)

    def clear(self) -> None:
        """Forget all requests."""
        with self._lock:
            self._records.clear()

    def entries(self) -> list[Json]:
        """Return a copy that JSON can carry."""
        with self._lock:
            return [asdict(record) for record in self._records]


@dataclass
class Request:
    """What arrived, and which faults are in store for it."""

    record: Record
    headers: Message
    content: bytes
    server_address: str
    faults: FaultBook

    @property
    def host(self) -> str:
        """Which of the two servers was asked: "hub" or "content"."""
        return self.record.host

    @property
    def path(self) -> str:
        """The path as it was sent, still quoted."""
        return self.record.path

    @property
    def query(self) -> dict[str, str]:
        """The first value of each query parameter."""
        return {name: values[0] for name, values in parse_qs(self.record.query).items()}

    @property
    def token(self) -> str | None:
        """The bearer token, if one was sent."""
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        return token if scheme.lower() == "bearer" else None

    @property
    def origin(self) -> str:
        """The address by which the client knows this server."""
        return f"http://{self.headers.get('Host', self.server_address)}"

    def fault(self, kind: str, span: Span | None = None) -> Fault | None:
        """Take the next fault of this kind that is scripted for this request, and log it."""
        target = f"{self.path}?{self.record.query}" if self.record.query else self.path
        fault = self.faults.take(kind, self.host, self.record.method, target, span)
        if fault is not None:
            self.record.faults.append(kind)
        return fault


@dataclass
class Answer:
    """A status, headers, and a body that is either bytes or a whole file."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Path = b""

    @property
    def size(self) -> int:
        """Bytes of the whole body."""
        return len(self.body) if isinstance(self.body, bytes) else self.body.stat().st_size


@dataclass(frozen=True)
class Part:
    """The bytes of a body that one answer sends."""

    body: bytes | Path
    start: int
    end: int


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Answer:
    """Answer with JSON."""
    body = json.dumps(value).encode()
    return Answer(status, {"Content-Type": "application/json; charset=utf-8", **(headers or {})}, body)


def error_answer(status: int, message: str, code: str | None = None) -> Answer:
    """Answer with an error the way the hub words it: in the body and in two headers."""
    headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return json_answer({"error": message}, status, headers)


def file_answer(path: Path, headers: dict[str, str]) -> Answer:
    """Answer with a file, of which the client may ask for a range."""
    return Answer(200, {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}, path)


def choose_part(request: Request, answer: Answer) -> tuple[Answer, Part]:
    """Narrow an answer to the range that was asked for."""
    size = answer.size
    if isinstance(answer.body, Path) and (short := request.fault("short")):
        size = short.position(size)
    whole = Part(answer.body, 0, size)
    wanted = request.record.range
    if answer.status != 200 or not isinstance(answer.body, Path) or not wanted or request.fault("ignore_range"):
        return answer, whole
    span = parse_range(wanted, size)
    if span is None:
        return answer, whole
    start, end = span
    if start >= end:
        refused = error_answer(416, "Range not satisfiable")
        refused.headers["Content-Range"] = f"bytes */{size}"
        return refused, Part(refused.body, 0, refused.size)
    headers = {**answer.headers, "Content-Range": f"bytes {start}-{end - 1}/{size}"}
    return Answer(206, headers, answer.body), Part(answer.body, start, end)


def parse_range(text: str, size: int) -> Span | None:
    """Read a `Range` header: None when it is not one plain byte range, an empty span when nothing lies in it."""
    unit, _, ranges = text.partition("=")
    first, dash, last = ranges.strip().partition("-")
    if unit != "bytes" or not dash or not (first + last).isdigit():
        return None
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size
