"""The threaded HTTP/1.1 server under both of the hub's sites: sends files without copying, and plays wire faults."""

import os
import select
import socket
import socketserver
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

from tests.lab.hub_faults import Fault
from tests.lab.hub_http import Answer, Part, Record, Request, choose_part
from tests.lab.hub_rate import RateLimit
from tests.lab.hub_state import HubState

Site = Callable[[Request], Answer]


class SiteServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """One listening port whose requests one site answers."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], host: str, site: Site, state: HubState) -> None:
        self.host = host
        self.site = site
        self.state = state
        self.stopping = threading.Event()
        self.connections: set[socket.socket] = set()
        super().__init__(address, Exchange)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Keep what went wrong here; a client that left is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            self.state.failures.append(traceback.format_exc())

    def stop(self) -> None:
        """Close the port and every connection, and wait until their threads are done."""
        self.stopping.set()
        self.shutdown()
        self.server_close()
        deadline = time.monotonic() + 5
        while self.connections and time.monotonic() < deadline:
            for connection in list(self.connections):
                if connection.fileno() >= 0:
                    close_now(connection)
            time.sleep(0.01)
        if self.connections:
            self.state.failures.append(f"{self.host}: {len(self.connections)} connections did not end")


def close_now(connection: socket.socket) -> None:
    """Shut a connection for both directions, if the other side has not done so already."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class Exchange(BaseHTTPRequestHandler):
    """One connection: reads requests, lets the site answer, sends."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: SiteServer
    connection: socket.socket

    def setup(self) -> None:
        """Give the connection its own limit beside the common one."""
        super().setup()
        self.server.connections.add(self.connection)
        self.rate = RateLimit(lambda: self.server.state.settings.connection_rate)

    def finish(self) -> None:
        """Let the server forget the connection."""
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Stay silent: the request log is the log."""

    def do_HEAD(self) -> None:
        """Serve a request for headers alone."""
        self._serve()

    def do_GET(self) -> None:
        """Serve a request for content."""
        self._serve()

    def do_POST(self) -> None:
        """Serve a request that brings content."""
        self._serve()

    def _serve(self) -> None:
        request = self._read()
        logged = not request.path.startswith("/_lab/")
        if logged:
            self.server.state.log.add(request.record)
        began = time.monotonic()
        try:
            answer = (self._scripted(request) if logged else None) or self.server.site(request)
            answer, part = choose_part(request, answer)
            self._send(request, answer, part)
        finally:
            request.record.seconds = time.monotonic() - began
            request.record.done = True
        if logged and (moved := request.fault("move_branch")):
            self.server.state.move_branch(**moved.options)

    def _read(self) -> Request:
        parts = urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        had_token = "Authorization" in self.headers
        record = Record(
            self.command,
            self.server.host,
            parts.path,
            parts.query,
            self.headers.get("Range"),
            had_token,
            self.client_address[0],
        )
        address, port = self.connection.getsockname()[:2]
        return Request(record, self.headers, content, f"{address}:{port}", self.server.state.faults)

    def _scripted(self, request: Request) -> Answer | None:
        """Return the answer that a fault puts in place of the site's."""
        if slow := request.fault("slow"):
            self._pause(slow)
        if status := request.fault("status"):
            options = status.options
            headers = {"Content-Type": "text/plain", **options.get("headers", {})}
            return Answer(options["status"], headers, options.get("body", "scripted").encode())
        if html := request.fault("html"):
            page = html.options.get("body", "<!doctype html><html><body>Please sign in to this network.</body></html>")
            return Answer(200, {"Content-Type": "text/html; charset=utf-8"}, page.encode())
        return None

    def _send(self, request: Request, answer: Answer, part: Part) -> None:
        headers = {**answer.headers, "Content-Length": str(part.end - part.start)}
        if dropped := request.fault("drop_headers"):
            names = {name.lower() for name in dropped.options["names"]}
            headers = {name: value for name, value in headers.items() if name.lower() not in names}
            self.close_connection = self.close_connection or "content-length" in names
        request.record.status = answer.status
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if request.record.method == "HEAD":
            return
        if isinstance(part.body, bytes):
            self._send_body(request, part, -1)
        else:
            with Path(part.body).open("rb") as file:
                self._send_body(request, part, file.fileno())

    def _send_body(self, request: Request, part: Part, file: int) -> None:
        """Send the part, halting at each place where a wire fault is due."""
        span = (part.start, part.end)
        due: list[tuple[int, Fault]] = []
        if request.record.status in (200, 206):
            for kind in ("stall", "cut"):
                if fault := request.fault(kind, span):
                    due.append((part.start + fault.position(part.end - part.start), fault))
            if fault := request.fault("wrong_byte", span):
                due.append((fault.options["offset"], fault))
        position = part.start
        for place, fault in sorted(due, key=lambda item: item[0]):
            self._send_span(request, Part(part.body, position, place), file)
            position = place
            if fault.kind == "wrong_byte":
                self._send_wrong_byte(request, Part(part.body, place, place + 1), file)
                position += 1
            elif not self._halt(fault):
                return
        self._send_span(request, Part(part.body, position, part.end), file)

    def _send_span(self, request: Request, part: Part, file: int) -> None:
        position = part.start
        while position < part.end:
            granted = self.server.state.rate.take(self.rate.take(part.end - position))
            if isinstance(part.body, bytes):
                sent = self.connection.send(memoryview(part.body)[position : position + granted])
            else:
                sent = os.sendfile(self.connection.fileno(), file, position, granted)
            if sent == 0:
                raise EOFError(f"the body of {request.path} ends at {position}, before {part.end}")
            position += sent
            request.record.bytes_sent += sent

    def _send_wrong_byte(self, request: Request, part: Part, file: int) -> None:
        right = part.body[part.start] if isinstance(part.body, bytes) else os.pread(file, 1, part.start)[0]
        self.connection.sendall(bytes([right ^ 0xFF]))
        request.record.bytes_sent += 1

    def _halt(self, fault: Fault) -> bool:
        """Play a stall or a cut; return whether sending goes on."""
        if fault.kind == "stall":
            self._pause(fault)
            if "seconds" in fault.options:
                return True
        elif fault.options.get("reset"):
            # Zero linger makes close() answer with RST: what the client has not read yet may be lost.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            os.close(self.connection.detach())
            return False
        self.close_connection = True
        close_now(self.connection)
        return False

    def _pause(self, fault: Fault) -> None:
        """Wait as long as the fault says, or else until the client leaves or the hub stops."""
        deadline = time.monotonic() + fault.options.get("seconds", float("inf"))
        while (left := deadline - time.monotonic()) > 0 and not self.server.stopping.wait(min(left, 0.05)):
            readable, _, _ = select.select([self.connection], [], [], 0)
            if readable and not self.connection.recv(1, socket.MSG_PEEK):
                return
