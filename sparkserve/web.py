"""The web as a download sees it: connections that are kept, proxies, the common pace, and failures worth another try.

The standard library's client is used and not httpx: it reads a body straight into a large buffer, which makes a local
download more than twice as fast, and its sockets are ours to cut when a run is interrupted.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import itertools
import socket
import ssl
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self
from urllib.parse import unquote, urlsplit

from sparkserve.errors import SparkserveError, usage_error

Origin = tuple[str, str, int]
_USER_AGENT = "sparkserve"


@dataclass(frozen=True)
class Limits:
    """How large the pieces are, how many connections a file and all files get, how patient we are; seconds and bytes.

    A connection that brings less than `least_bytes` while we wait `read_seconds` for it is dropped.
    """

    segment_bytes: int = 8 << 20
    span_segments: int = 32
    connections: int = 6
    all_connections: int = 10
    connect_seconds: float = 10.0
    read_seconds: float = 30.0
    least_bytes: int = 32 << 10
    tries: int = 10
    first_wait: float = 1.0
    longest_wait: float = 30.0
    longest_retry_after: float = 300.0


class Trouble(Exception):
    """A failure that may pass: given up after `tries` in a row without progress; `wait` is the server's own wish."""

    def __init__(self, error: SparkserveError, tries: int | None = None, wait: float | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.tries = tries
        self.wait = wait


class Stopped(Exception):
    """Another thread of the same download failed or was interrupted."""


class StopSign:
    """Lets one thread end the others of a download at once, also those that wait for a server."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._watched: set[http.client.HTTPConnection] = set()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Raise `Stopped` when the sign is up."""
        if self._event.is_set():
            raise Stopped

    def sleep(self, seconds: float) -> None:
        """Wait, unless the sign goes up."""
        if self._event.wait(max(0.0, seconds)):
            raise Stopped

    def watch(self, connection: http.client.HTTPConnection) -> None:
        """Cut this connection when the sign goes up, until it is forgotten."""
        self.check()
        with self._lock:
            self._watched.add(connection)

    def forget(self, connection: http.client.HTTPConnection) -> None:
        """Let this connection be, whatever comes."""
        with self._lock:
            self._watched.discard(connection)

    def raise_it(self) -> None:
        """Put the sign up."""
        self._event.set()
        with self._lock:
            for connection in self._watched:
                if connection.sock is not None:
                    with contextlib.suppress(OSError):  # it may have been closed in this moment
                        # Closed without lingering, it tells the server with a reset. Linux reads what had arrived at a
                        # shut socket without asking for more, and so leaves a sender to wait a minute for room.
                        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)


class Pace:
    """What all connections of a run share: a rate limit, and a pause that a server asked for."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._held_until = 0.0

    @property
    def chunk_bytes(self) -> int:
        """How much to read at once: large, but not so large that a low rate becomes jerky."""
        return min(1 << 20, max(16 << 10, self._rate // 16)) if self._rate else 1 << 20

    def spend(self, count: int, stop: StopSign) -> None:
        """Wait until so many bytes fit into the rate."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            begin = max(now, self._free_at)
            self._free_at = begin + count / self._rate
        stop.sleep(begin - now)

    def hold(self, seconds: float) -> None:
        """Let nobody begin a request for so long."""
        with self._lock:
            self._held_until = max(self._held_until, time.monotonic() + seconds)

    def wait(self, stop: StopSign) -> None:
        """Wait for the end of a pause."""
        while (left := self._held_until - time.monotonic()) > 0:
            stop.sleep(left)


class Turns:
    """Gives connections to the file that was begun first: whole sooner, it is on its way to the worker sooner."""

    def __init__(self, width: int) -> None:
        self._free = width
        self._waiting: list[int] = []
        self._changed = threading.Condition()
        self._begun = itertools.count()

    def begin(self) -> int:
        """Give a file its place behind all others."""
        return next(self._begun)

    @contextlib.contextmanager
    def take(self, place: int, stop: StopSign) -> Iterator[None]:
        """Hold one connection's turn."""
        with self._changed:
            self._waiting.append(place)
            try:
                while not self._free or place != min(self._waiting):
                    stop.check()
                    self._changed.wait(0.5)
                self._free -= 1
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._changed.notify_all()


@dataclass(frozen=True)
class Proxy:
    """The proxy that the environment names for an address."""

    host: str
    port: int
    headers: dict[str, str]


def find_proxy(origin: Origin) -> Proxy | None:
    """Read the usual variables (https_proxy, no_proxy, …)."""
    scheme, host, port = origin
    address = urllib.request.getproxies().get(scheme) or urllib.request.getproxies().get("all")
    if not address or urllib.request.proxy_bypass(f"{host}:{port}") or urllib.request.proxy_bypass(host):
        return None
    parts = urlsplit(address if "://" in address else f"http://{address}")
    if parts.scheme != "http" or not parts.hostname:
        message = f"the proxy for {scheme} is {parts.scheme}://…, needed is http://host:port"
        raise usage_error("proxy_unsupported", message, f"set {scheme}_proxy to that, or `unset {scheme}_proxy`")
    headers = {}
    if parts.username:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = "Basic " + base64.b64encode(login.encode()).decode()
    return Proxy(parts.hostname, parts.port or 80, headers)


def origin_of(url: str) -> Origin:
    """Give scheme, host and port: what decides whether a server may see the token."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        message = f"{parts.scheme}://{parts.hostname or ''} is no http or https address"
        raise SparkserveError("bad_address", message, "look at HF_ENDPOINT: `sparkserve config` shows where it is from")
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


class _Kept(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.idle: dict[Origin, http.client.HTTPConnection] = {}


class Connections:
    """Each thread's own connections, kept for its next request to the same server until it closes them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._kept = _Kept()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()

    def take(self, origin: Origin) -> http.client.HTTPConnection:
        """Give the connection that waits for work, or a new one that is not open yet."""
        if kept := self._kept.idle.pop(origin, None):
            return kept
        scheme, host, port = origin
        proxy = find_proxy(origin)
        place = (proxy.host, proxy.port) if proxy else (host, port)
        if scheme == "http":
            return http.client.HTTPConnection(*place, timeout=self.limits.connect_seconds)
        secure = http.client.HTTPSConnection(*place, timeout=self.limits.connect_seconds, context=self._tls)
        if proxy:
            secure.set_tunnel(host, port, proxy.headers)
        return secure

    def give_back(self, origin: Origin, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose last answer was read to its end."""
        self._kept.idle[origin] = connection

    def close(self) -> None:
        """Close what this thread kept."""
        for connection in self._kept.idle.values():
            connection.close()
        self._kept.idle.clear()


class Exchange:
    """One GET and its answer, nothing followed; network failures come out as `Trouble`, and only they do."""

    def __init__(self, connections: Connections, url: str, headers: dict[str, str], stop: StopSign) -> None:
        self.origin = origin_of(url)
        self._waited, self._brought = 0.0, 0
        self._connections = connections
        self._stop = stop
        self._connection = connections.take(self.origin)
        try:
            stop.watch(self._connection)
            with self._as_trouble():
                self._response = self._send(url, headers)
        except BaseException:
            self._drop()
            raise
        self.status = self._response.status
        self.headers = self._response.headers

    def _send(self, url: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = self._connection
        is_open = connection.sock is not None
        if not is_open:
            connection.connect()
            self._stop.check()
            connection.sock.settimeout(self._connections.limits.read_seconds)
        connection.request("GET", *_request_line(url, self.origin, headers))
        return connection.getresponse()

    def read_into(self, buffer: memoryview) -> int:
        """Read what is there; 0 means that the body has ended. Who only drips is as good as silent."""
        response, limits, begun = self._response, self._connections.limits, time.monotonic()
        with self._as_trouble():
            if response.length:
                count = response.fp.readinto1(buffer[: response.length])
                response.length -= count
                if not count or not response.length:
                    response.close()
            else:
                data = response.read1(len(buffer))
                count = len(data)
                buffer[:count] = data
            self._waited += time.monotonic() - begun
            self._brought += count
            if self._waited >= limits.read_seconds:
                if self._brought < limits.least_bytes:
                    raise TimeoutError
                self._waited, self._brought = 0.0, 0
        return count

    def finish(self) -> None:
        """Read what is left of a short answer, so that its connection can be used again."""
        left = memoryview(bytearray(1 << 16))
        while left and (count := self.read_into(left)):
            left = left[count:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # `length` is what the body still owes: a connection that was cut is closed too, and must not be used again.
        if self._response.isclosed() and not self._response.will_close and not self._response.length:
            self._stop.forget(self._connection)
            self._connections.give_back(self.origin, self._connection)
        else:
            self._response.close()
            self._drop()

    def _drop(self) -> None:
        self._stop.forget(self._connection)
        self._connection.close()

    @contextlib.contextmanager
    def _as_trouble(self) -> Iterator[None]:
        """Put network failures in words; addresses are told without their query, which may be a signature."""
        where = f"{self.origin[1]} port {self.origin[2]}"
        hint = "look at the network, then run the same command again: what has arrived is kept"
        try:
            yield
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._stop.check()
            tries = None
            if isinstance(error, ssl.SSLCertVerificationError):
                tries, text = 1, f"{where} shows a certificate that is not trusted"
                code, hint = "tls_untrusted", "look at the clock, the proxy and the CA store of this machine"
            elif isinstance(error, TimeoutError):
                least, seconds = self._connections.limits.least_bytes, self._connections.limits.read_seconds
                code, text = "stalled", f"{where} gave less than {least} bytes in {seconds:g} s"
            elif isinstance(error, socket.gaierror):
                code, text = "name_unknown", f"cannot find the address of {self.origin[1]}"
            else:
                code, text = "connection_cut", f"the connection to {where} broke"
            raise Trouble(SparkserveError(code, text, hint, details=str(error)), tries) from error


def _request_line(url: str, origin: Origin, headers: dict[str, str]) -> tuple[str, None, dict[str, str]]:
    """Give target, body and headers; a plain request through a proxy names the whole address."""
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    wanted = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity", **headers}
    proxy = find_proxy(origin) if origin[0] == "http" else None
    if proxy is None:
        return target, None, wanted
    return f"http://{parts.netloc}{target}", None, {**wanted, **proxy.headers}
