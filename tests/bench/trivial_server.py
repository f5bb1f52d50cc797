"""A server that is up at once, for the comparison of launchers: rank 0 answers every request, the others only wait."""

import json
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "tiny"


def option(name: str, default: str) -> str:
    """Give what follows an option; whatever else a launcher adds is left alone."""
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else default


class Handler(BaseHTTPRequestHandler):
    """Answers with one token, also as a stream."""

    def give(self, kind: str, body: bytes) -> None:
        """Send a whole answer."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Answer health and the list of models."""
        self.give("application/json", json.dumps({"data": [{"id": MODEL}]}).encode())

    def do_POST(self) -> None:
        """Answer a completion."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": "a"}
        choice = {"index": 0, "text": "a", "message": message, "delta": message, "finish_reason": "length"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = json.dumps({"id": "1", "model": MODEL, "choices": [choice], "usage": usage})
        if asked.get("stream"):
            self.give("text/event-stream", f"data: {body}\n\ndata: [DONE]\n\n".encode())
        else:
            self.give("application/json", body.encode())


def main() -> None:
    """Serve, or wait, until somebody ends it."""
    if option("--node-rank", "0") != "0":
        time.sleep(1e9)
    # Where ranks would meet: a launcher may wait for this port before it starts the others.
    meeting = socket.create_server(("", int(option("--master-port", "29501"))))
    with meeting:
        ThreadingHTTPServer(("", int(option("--port", "8000"))), Handler).serve_forever()


main()
