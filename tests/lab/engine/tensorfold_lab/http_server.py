"""The HTTP side of rank 0."""

import json
import select
import socket
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .api_keys import allowed
from .arguments import Settings
from .chat_request import RequestError, chat_prompt, text_prompt
from .completions import ClientGoneError, Completions
from .lifetime import EngineError
from .tokens import split_tokens, token_number

LONGEST_BODY = 64 << 20
METRICS_ROUTES = frozenset({"/metrics", "/v1/metrics"})


class HttpServer(ThreadingHTTPServer):
    """Listens once the model is loaded."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, settings: Settings, completions: Completions, keys: tuple[str, ...]) -> None:
        self.settings = settings
        self.completions = completions
        self.keys = keys
        try:
            super().__init__((settings.host, settings.port), Handler)
        except OSError as problem:
            raise EngineError(f"OSError: cannot serve on {settings.host}:{settings.port}: {problem}") from problem

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent about a client that went away; anything else is a bug and is shown."""
        import sys

        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = 120
    server: HttpServer

    def do_GET(self) -> None:
        """Answer the routes that only look."""
        self._answer(
            {
                "/health": self._health,
                "/v1/models": self._models,
                "/metrics": self._metrics,
                "/v1/metrics": self._metrics,
            }
        )

    def do_POST(self) -> None:
        """Answer the routes that ask for work."""
        self._answer(
            {
                "/v1/chat/completions": lambda: self._complete(chat=True),
                "/v1/completions": lambda: self._complete(chat=False),
                "/tokenize": self._tokenize,
                "/v1/tokenize": self._tokenize,
            }
        )

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing: the engine logs requests when they are done."""

    def _answer(self, routes: dict[str, Any]) -> None:
        path = self.path.partition("?")[0]
        try:
            if not self._may_pass(path):
                raise RequestError("missing or wrong API key", 401, "invalid_api_key")
            if path not in routes:
                raise RequestError(f"no route {self.command} {path}", 404, "not_found")
            routes[path]()
        except RequestError as problem:
            self._send_error_object(problem)
        except ClientGoneError:
            self.close_connection = True

    def _may_pass(self, path: str) -> bool:
        open_routes = {"/health"} | (METRICS_ROUTES if self.server.settings.metrics_open else set())
        return path in open_routes or allowed(self.server.keys, self.headers.get("Authorization"))

    def _health(self) -> None:
        if self.server.completions.control.now.health == "fail":
            self._send_json({"ok": False, "status": "error"}, HTTPStatus.SERVICE_UNAVAILABLE)
        elif self.server.keys:
            self._send_json({"status": "ok"})
        else:
            self._send_json(self._health_details())

    def _health_details(self) -> dict[str, Any]:
        engine = self.server.completions.engine
        running = int(engine.gauges()["requests_running"])
        streams = {"decoding": engine.decoding, "prefilling": engine.prefilling, "max": engine.parallel}
        return {
            "ok": True,
            "status": "ok",
            "backend": "cuda",
            "busy": running > 0,
            "requests_running": running,
            **engine.counters.health(),
            "context_length": self.server.settings.context,
            **({"streams": streams} if engine.parallel > 1 else {}),
        }

    def _models(self) -> None:
        context = self.server.settings.context
        names = self.server.completions.names
        entry = {"object": "model", "owned_by": "tensorfold", "max_model_len": context}
        self._send_json({"object": "list", "data": [{"id": name, **entry} for name in names]})

    def _metrics(self) -> None:
        engine = self.server.completions.engine
        self._send(engine.counters.prometheus(engine.gauges()).encode(), "text/plain; version=0.0.4")

    def _tokenize(self) -> None:
        body = self._body()
        if "messages" in body:
            text, _ = chat_prompt(body, vision=self.server.settings.vision)
        else:
            text = text_prompt(body)
        pieces = split_tokens(text)
        reply: dict[str, Any] = {"count": len(pieces), "max_model_len": self.server.settings.context}
        reply["tokens"] = [token_number(piece) for piece in pieces]
        if body.get("return_token_strs"):
            reply["token_strs"] = pieces
        self._send_json(reply)

    def _complete(self, *, chat: bool) -> None:
        body = self._body()
        running = self.server.completions.begin(body, chat=chat, client_gone=self._client_gone)
        if running.ask.stream:
            self._send_stream(running.stream())
        else:
            self._send_json(running.whole())

    def _body(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= LONGEST_BODY:
            self.close_connection = True
            raise RequestError("the request needs a JSON body")
        try:
            body = json.loads(self.rfile.read(length))
        except ValueError as problem:
            raise RequestError(f"the body is not JSON: {problem}") from problem
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object")
        return body

    def _client_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def _send_stream(self, chunks: Iterator[dict[str, Any]]) -> None:
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for chunk in chunks:
                self._send_event(json.dumps(chunk))
            self._send_event("[DONE]")
        except RequestError as problem:
            self._send_event(json.dumps(_error_object(problem)))

    def _send_event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())

    def _send_error_object(self, problem: RequestError) -> None:
        if problem.status == HTTPStatus.UNAUTHORIZED:
            self.close_connection = True  # the body was not read
        self._send_json(_error_object(problem), HTTPStatus(problem.status))

    def _send_json(self, body: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(body).encode(), "application/json", status)

    def _send(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if status == HTTPStatus.UNAUTHORIZED:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(content)


def _error_object(problem: RequestError) -> dict[str, Any]:
    kind = "server_error" if problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {"error": {"message": str(problem), "type": kind, "param": None, "code": problem.code}}
