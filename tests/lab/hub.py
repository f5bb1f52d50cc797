"""A local stand-in for the model hub: the hub itself and a content server, each on its own port and name.

In a test: `with Hub(repos) as hub: …`. As a process: `python -m tests.lab.hub --bind ADDR --repos DIR`; it prints one
JSON line with its addresses once it serves, and another process scripts it by `POST /_lab/control`, reads
`GET /_lab/log` and starts afresh by `POST /_lab/reset`. Raw files are under `/files/`, git repositories under `/git/`
(plain files) and `/smart-git/` (a git server).
"""

import argparse
import json
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from tests.lab.git_area import FILES_AREA, GIT_AREA, smart_answer
from tests.lab.hub_content import ContentSite
from tests.lab.hub_faults import Json
from tests.lab.hub_http import Answer, Request, error_answer, file_answer, json_answer
from tests.lab.hub_pages import HubPages
from tests.lab.hub_server import SiteServer
from tests.lab.hub_state import HubState

_AREAS = {"files": FILES_AREA, "git": GIT_AREA}


@dataclass
class Hub:
    """The two servers together; without names, links carry the address at which the client reached the hub."""

    repos: Path
    bind: str = "127.0.0.1"
    hub_name: str = "hub.lab"
    content_name: str = "cdn.lab"
    port: int = 0
    content_port: int = 0
    token: str | None = None

    def __post_init__(self) -> None:
        self.state = HubState(self.repos, self.token)
        self._servers: list[SiteServer] = []

    def start(self) -> "Hub":
        """Open both ports and serve in threads."""
        content = ContentSite(self.state)
        self._pages = HubPages(self.state, content, self._content_origin)
        hub_server = SiteServer((self.bind, self.port), "hub", self._hub_site, self.state)
        content_server = SiteServer((self.bind, self.content_port), "content", content, self.state)
        self.port, self.content_port = hub_server.port, content_server.port
        self._servers = [hub_server, content_server]
        for server in self._servers:
            # Polling often makes stopping quick.
            threading.Thread(target=server.serve_forever, args=(0.05,), name=server.host, daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop both servers; raise when one of them failed on the way, for then the test proved nothing."""
        self.state.settings.rate = self.state.settings.connection_rate = None
        for server in self._servers:
            server.stop()
        self._servers = []
        if self.state.failures:
            raise RuntimeError("the hub itself failed:\n" + "\n".join(self.state.failures))

    def __enter__(self) -> "Hub":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """What belongs into HF_ENDPOINT."""
        return f"http://{self.hub_name or self.bind}:{self.port}"

    def fault(self, kind: str, *, match: Json | None = None, times: int | None = None, **options: object) -> None:
        """Script a fault; see `hub_faults` for kinds and options."""
        left = {} if times is None else {"times": times}
        self.state.faults.add({"fault": kind, "match": match or {}, **left, **options})

    def control(self, **order: object) -> None:
        """Carry out the same orders as `/_lab/control`."""
        self.state.control(order)

    def log(self) -> list[Json]:
        """Return what was served so far, once nothing is being served any more."""
        return self.state.wait_idle()

    def reset(self) -> None:
        """Forget faults, log, moved branches and changed settings."""
        self.state.reset()

    def _content_origin(self, request: Request) -> str:
        name = self.content_name or request.server_address.rpartition(":")[0]
        return f"http://{name}:{self.content_port}"

    def _hub_site(self, request: Request) -> Answer:
        area, _, rest = request.path[1:].partition("/")
        if area == "_lab":
            return self._lab(request, rest)
        if area in _AREAS:
            return self._raw(self.repos / _AREAS[area], unquote(rest))
        if area == "smart-git":
            return smart_answer(request, self.repos, unquote(rest))
        return self._pages(request)

    def _raw(self, area: Path, path: str) -> Answer:
        """Answer with a file of a plain area, and with nothing outside it."""
        target = (area / path).resolve()
        if not target.is_relative_to(area.resolve()) or not target.is_file():
            return error_answer(404, f"no such file: {path}")
        return file_answer(target, {"Cache-Control": "no-cache"})

    def _lab(self, request: Request, page: str) -> Answer:
        """Answer the test that scripts this hub."""
        if (request.record.method, page) == ("GET", "log"):
            return json_answer({"requests": self.state.log.entries(), "failures": self.state.failures})
        if (request.record.method, page) == ("POST", "reset"):
            self.state.reset()
            return json_answer({"ok": True})
        if (request.record.method, page) != ("POST", "control"):
            return error_answer(404, "known: GET log, POST control, POST reset")
        try:
            self.state.control(json.loads(request.content))
        except (ValueError, TypeError) as error:
            return error_answer(400, str(error))
        return json_answer({"ok": True})


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="A local stand-in for the model hub")
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--content-port", type=int, default=0)
    parser.add_argument("--repos", type=Path, required=True)
    parser.add_argument("--token")
    parser.add_argument("--hub-name", default="hub.lab")
    parser.add_argument("--content-name", default="cdn.lab")
    options = vars(parser.parse_args())
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    with Hub(**options) as hub:
        line = {"endpoint": hub.endpoint, "port": hub.port, "content_port": hub.content_port}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        done.wait()


if __name__ == "__main__":
    main()
