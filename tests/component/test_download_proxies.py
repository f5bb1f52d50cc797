"""A hub with TLS behind a proxy that wants a login, and one whose certificate nobody vouches for."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from sparkserve.download import download
from sparkserve.errors import SparkserveError
from sparkserve.hub_file import Hub
from sparkserve.inventory import Item
from sparkserve.manifest import Manifest, ManifestFile
from sparkserve.settings import Settings
from tests.component.weights_stage import QUICK, Recorder

CONTENT = b"weights " * 5000
NAME = "hub.test"  # which only the proxy finds


class Site(BaseHTTPRequestHandler):
    """Gives one file to everybody."""

    protocol_version = "HTTP/1.1"
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.headers.get("Authorization", ""))
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Keep quiet."""


class Proxy(BaseHTTPRequestHandler):
    """Carries bytes to a port of this machine, whatever name is asked for."""

    asked: ClassVar[list[tuple[str, str]]] = []

    def do_CONNECT(self) -> None:
        self.asked.append((self.path, self.headers.get("Proxy-Authorization", "")))
        self.send_response(200)
        self.end_headers()
        with socket.create_connection(("127.0.0.1", int(self.path.rpartition(":")[2]))) as there:
            back = threading.Thread(target=pour, args=(there, self.connection))
            back.start()
            pour(self.connection, there)
            back.join()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Keep quiet."""


def pour(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def served(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class Web:
    """The hub's port, and the certificate that vouches for it."""

    port: int
    certificate: Path
    item: Item = field(init=False)

    def __post_init__(self) -> None:
        file = ManifestFile(path="f", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(), git_sha1=None)
        self.item = Item(Manifest(name="m", repository="o/n", commit="1" * 40, files=(file,)), file)

    def fetch(self, path: Path) -> None:
        settings = Settings.model_validate({"hf_endpoint": f"https://{NAME}:{self.port}", "hf_token": "hf_secret"})
        download(Hub(settings, QUICK), self.item, path, Recorder())
        assert path.read_bytes() == CONTENT


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run([*made, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    for handler in (Site, Proxy):
        monkeypatch.setattr(handler, "asked", [])
    with served(Site, tls) as port, served(Proxy) as proxy:
        monkeypatch.setenv("https_proxy", f"http://me:pass%20word@127.0.0.1:{proxy}")
        yield Web(port, certificate)


def test_a_proxy_sees_where_and_who_and_the_hub_alone_the_token(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(web.certificate))
    web.fetch(tmp_path / "hidden" / "partial")
    assert Proxy.asked == [(f"{NAME}:{web.port}", f"Basic {b64encode(b'me:pass word').decode()}")]
    assert Site.asked == ["Bearer hf_secret"]


def test_a_certificate_that_nobody_vouches_for_is_not_tried_again(web: Web, tmp_path: Path) -> None:
    with pytest.raises(SparkserveError, match=NAME) as caught:
        web.fetch(tmp_path / "hidden" / "partial")
    assert (caught.value.code, len(Proxy.asked), Site.asked) == ("tls_untrusted", 1, [])
