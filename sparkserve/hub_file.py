"""One file on the hub: asking for a part of it, following the hub to its content server, and what a refusal means."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urljoin

from sparkserve.errors import SparkserveError
from sparkserve.hub import hub_refused, retry_after
from sparkserve.inventory import Item
from sparkserve.settings import Settings
from sparkserve.web import Connections, Exchange, Limits, Pace, StopSign, Trouble, Turns, origin_of

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 6
_AGAIN = "wait a minute, then run the same command again: what has arrived is kept"


@dataclass
class Hub:
    """What all downloads of a run share: the endpoint and its token, connections, and the pace."""

    settings: Settings
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.connections = Connections(self.limits)
        self.pace = Pace(self.settings.rate_limit)
        self.turns = Turns(self.limits.all_connections)

    def token_for(self, url: str) -> dict[str, str]:
        """Give the header with the token, for the hub's own host only."""
        token = self.settings.hf_token
        if token is None or origin_of(url) != origin_of(self.settings.hf_endpoint):
            return {}
        return {"Authorization": f"Bearer {token.get_secret_value()}"}


class Source:
    """Where a file's bytes come from; remembers the content server's link until that one refuses."""

    def __init__(self, hub: Hub, wanted: Item, stop: StopSign) -> None:
        self._hub = hub
        self._wanted = wanted
        self._stop = stop
        self._home = wanted.address(hub.settings.hf_endpoint)
        self._link = self._home

    def open(self, start: int, end: int) -> tuple[Exchange, int]:
        """Ask for the bytes from `start` to `end`; give where the answer begins: at 0 if the server ignores ranges."""
        size = self._wanted.file.size
        headers = {} if (start, end) == (0, size) else {"Range": f"bytes={start}-{end - 1}"}
        exchange = self._follow(headers)
        try:
            return exchange, self._checked_start(exchange, start)
        except BaseException:
            exchange.__exit__()
            raise

    def _follow(self, headers: dict[str, str]) -> Exchange:
        url = self._link
        for _ in range(_MOST_REDIRECTS):
            self._hub.pace.wait(self._stop)
            exchange = Exchange(self._hub.connections, url, headers | self._hub.token_for(url), self._stop)
            location = exchange.headers.get("Location")
            if exchange.status not in _REDIRECTS or not location:
                self._link = url
                return exchange
            with exchange:
                exchange.finish()
            url = urljoin(url, location)
        raise Trouble(
            SparkserveError("hub_failed", f"{self._wanted}: the hub redirects in circles", "look at HF_ENDPOINT"), 1
        )

    def _checked_start(self, exchange: Exchange, start: int) -> int:
        """Make sure that the answer is a part of the file that the lock names; give where it begins."""
        size = self._wanted.file.size
        if exchange.status not in (200, 206):
            raise self._refusal(exchange)
        kind = exchange.headers.get_content_type()
        if kind == "text/html" and not self._wanted.file.path.endswith((".html", ".htm")):
            text = f"{self._wanted}: {exchange.origin[1]} answers with a web page in place of the file"
            raise Trouble(
                SparkserveError("not_data", text, "look for a sign-in page of the network, or at HF_ENDPOINT"), 3
            )
        if exchange.status == 200:
            begin, length = 0, exchange.headers.get("Content-Length", "")
            total = int(length) if length.isdigit() else size
        else:
            found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", exchange.headers.get("Content-Range", "").strip())
            begin, total = (int(found[1]), int(found[2]) if found[2] != "*" else size) if found else (-1, size)
        if total != size:
            raise self._wrong_size(total)
        if begin > start or begin < 0:
            text = f"{self._wanted}: {exchange.origin[1]} sends other bytes than it was asked for"
            raise Trouble(SparkserveError("hub_failed", text, "look at HF_ENDPOINT and the proxy"), 3)
        return begin

    def _wrong_size(self, total: int) -> Trouble:
        text = f"{self._wanted} has {total} bytes there; needed, by the lock: {self._wanted.file.size}"
        hint = "`sparkserve lock --check` compares the lock with the hub; a mirror may be broken: see HF_ENDPOINT"
        return Trouble(SparkserveError("wrong_size", text, hint), 3)

    def _refusal(self, exchange: Exchange) -> Trouble:
        status, settings = exchange.status, self._hub.settings
        at_home = exchange.origin == origin_of(settings.hf_endpoint)
        details = exchange.headers.get("X-Error-Message", "")
        if status == 416:
            found = re.fullmatch(r"bytes \*/(\d+)", exchange.headers.get("Content-Range", "").strip())
            return self._wrong_size(int(found[1]) if found else 0)
        if status == 429 or status >= 500:
            return self._overload(exchange)
        if not at_home:
            self._link = self._home  # a signed link ends some day: the hub gives a new one
            text = f"{self._wanted}: {exchange.origin[1]} answers {status}, also to a new link of the hub"
            return Trouble(SparkserveError("link_refused", text, _AGAIN, details=details), 5)
        if status == 404 and exchange.headers.get("X-Error-Code") != "RepoNotFound":
            text = f"{settings.hf_endpoint} has no {self._wanted}"
            hint = "`sparkserve lock --check` compares the lock with the hub; a mirror may lack it: look at HF_ENDPOINT"
            return Trouble(SparkserveError("hub_file_missing", text, hint, details=details), 1)
        gated = exchange.headers.get("X-Error-Code") == "GatedRepo" and settings.hf_token is not None
        return Trouble(hub_refused(settings, self._wanted.manifest.repository, 403 if gated else status, details), 1)

    def _overload(self, exchange: Exchange) -> Trouble:
        """Too many requests, or a server that is down: everybody waits as long as it asks for, within reason."""
        error = hub_refused(self._hub.settings, self._wanted.manifest.repository, exchange.status)
        asked = retry_after(exchange.headers.get("Retry-After", ""))
        if asked is not None and asked > self._hub.limits.longest_retry_after:
            error.message += f" and asks to wait {asked:.0f} s"
            return Trouble(error, 1)
        if asked:
            self._hub.pace.hold(asked)
        return Trouble(error, wait=asked)
