"""An image registry on loopback: manifests by tag and digest, behind a bearer challenge; anything else is a failure."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TOKEN = "anonymous-pull-token"
INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass
class FakeRegistry:
    """One repository `org/base`; `challenge` is what an unauthorized request is told."""

    tags: dict[str, bytes] = field(default_factory=dict)
    challenge: str = 'Bearer realm="{address}/token",service="fake",scope="repository:org/base:pull"'
    status: int = 200
    tells_digest: bool = True
    told_digest: str = ""
    port: int = 0
    requests: list[str] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def image(self, tag: str = "1") -> str:
        return f"127.0.0.1:{self.port}/org/base:{tag}"

    def digest(self, tag: str = "1") -> str:
        return "sha256:" + hashlib.sha256(self.tags[tag]).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    registry: FakeRegistry

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        registry, parts = self.registry, urlsplit(self.path)
        registry.requests.append(f"{self.command} {self.path}")
        if parts.path == "/token":
            fine = parse_qs(parts.query) == {"service": ["fake"], "scope": ["repository:org/base:pull"]}
            body = json.dumps({"token": TOKEN}).encode()
            return self._send(200 if fine else 400, body, {}, with_body=with_body)
        if not parts.path.startswith("/v2/org/base/manifests/"):
            registry.surprises.append(self.path)
            return self._send(500, b"", {}, with_body=with_body)
        if registry.challenge and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            challenge = registry.challenge.format(address=registry.address)
            return self._send(401, b"", {"WWW-Authenticate": challenge}, with_body=with_body)
        return self._manifest(parts.path.rpartition("/")[2], with_body=with_body)

    def _manifest(self, wanted: str, *, with_body: bool) -> None:
        registry = self.registry
        if INDEX not in self.headers.get("Accept", ""):
            registry.surprises.append("no Accept of an index")
        by_digest = {registry.digest(tag): body for tag, body in registry.tags.items()}
        body = by_digest.get(wanted, registry.tags.get(wanted))
        if registry.status != 200 or body is None:
            return self._send(404 if registry.status == 200 else registry.status, b"", {}, with_body=with_body)
        digest = {"Docker-Content-Digest": registry.told_digest or "sha256:" + hashlib.sha256(body).hexdigest()}
        headers = {"Content-Type": INDEX, **(digest if registry.tells_digest else {})}
        return self._send(200, body, headers, with_body=with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Keep quiet."""


@contextmanager
def running_registry() -> Iterator[FakeRegistry]:
    """Serve a registry with one tag, and fail where it was asked for something it does not know."""
    registry = FakeRegistry({"1": b'{"schemaVersion": 2, "manifests": []}'})
    handler = type("Handler", (_Handler,), {"registry": registry})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    registry.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
    assert not registry.surprises
