"""Faults of the hub, scripted per request pattern.

A fault is a JSON object: `{"fault": KIND, "match": {…}, "times": N, …options of the kind…}`. Without `times` it never
wears off. All parts of `match` are optional: `host` ("hub" or "content"), `method`, `path_regex` (searched in the path
with its query), `covers` (a byte of the file that the answer must hold). Positions are `at_byte` or `at_fraction`.

Before the answer: `slow` (seconds), `status` (status, headers, body), `html` (200 and a page, body), `expire` (content
server: 403 for this signed URL from now on; a newly resolved one works).
In the answer: `drop_headers` (names), `mask_hash` (listing without lfs), `cut_listing` (only the first page, no word
of a next one), `ignore_range` (200 and everything), `short` (the file ends early and all headers agree; position in
the file).
On the wire: `stall` (position in this body; seconds, else until the client leaves), `cut` (the connection closes at a
position in this body, `reset` for a hard one), `wrong_byte` (offset in the file).
After the answer: `move_branch` (repo, branch, commit).
"""

import re
import threading
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

_POSITION = frozenset({"at_byte", "at_fraction"})
OPTIONS: dict[str, frozenset[str]] = {
    "slow": frozenset({"seconds"}),
    "status": frozenset({"status", "headers", "body"}),
    "html": frozenset({"body"}),
    "expire": frozenset(),
    "drop_headers": frozenset({"names"}),
    "mask_hash": frozenset(),
    "cut_listing": frozenset(),
    "ignore_range": frozenset(),
    "short": _POSITION,
    "stall": _POSITION | {"seconds"},
    "cut": _POSITION | {"reset"},
    "wrong_byte": frozenset({"offset"}),
    "move_branch": frozenset({"repo", "branch", "commit"}),
}
_REQUIRED: dict[str, frozenset[str]] = {
    "slow": frozenset({"seconds"}),
    "status": frozenset({"status"}),
    "drop_headers": frozenset({"names"}),
    "wrong_byte": frozenset({"offset"}),
    "move_branch": frozenset({"repo", "branch", "commit"}),
}
_MATCH = frozenset({"host", "path_regex", "method", "covers"})
Span = tuple[int, int]


@dataclass
class Fault:
    """One scripted fault and how often it still has to happen (None: for ever)."""

    kind: str
    match: Json
    options: Json
    left: int | None

    def concerns(self, host: str, method: str, target: str, span: Span | None) -> bool:
        """Tell whether it befalls this request; `span` is what the answer holds of its file."""
        match = self.match
        covered = [place for place in (match.get("covers"), self.options.get("offset")) if place is not None]
        return (
            self.left != 0
            and match.get("host", host) == host
            and match.get("method", method) == method
            and re.search(match.get("path_regex", ""), target) is not None
            and (not covered or (span is not None and all(span[0] <= place < span[1] for place in covered)))
        )

    def position(self, size: int) -> int:
        """Return its place in something of `size` bytes."""
        if "at_fraction" in self.options:
            return int(size * self.options["at_fraction"])
        return min(size, int(self.options.get("at_byte", 0)))


def parse_fault(spec: Json) -> Fault:
    """Read a fault, refusing every word that has no meaning: a misspelt fault would prove nothing."""
    options = dict(spec)
    kind, match, times = options.pop("fault", None), options.pop("match", {}), options.pop("times", None)
    if kind not in OPTIONS:
        raise ValueError(f"unknown fault {kind!r}; known: {', '.join(OPTIONS)}")
    unknown = (options.keys() - OPTIONS[kind]) | (match.keys() - _MATCH)
    missing = _REQUIRED.get(kind, frozenset()) - options.keys()
    if unknown or missing:
        raise ValueError(f"fault {kind!r}: unknown {sorted(unknown)}, missing {sorted(missing)}")
    if match.get("host", "hub") not in ("hub", "content"):
        raise ValueError(f"fault {kind!r}: host is 'hub' or 'content', not {match['host']!r}")
    re.compile(match.get("path_regex", ""))
    return Fault(kind, match, options, times)


class FaultBook:
    """All scripted faults, in the order in which they were added."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []

    def add(self, spec: Json) -> None:
        """Script one more fault."""
        fault = parse_fault(spec)
        with self._lock:
            self._faults.append(fault)

    def clear(self) -> None:
        """Forget all faults."""
        with self._lock:
            self._faults.clear()

    def take(self, kind: str, host: str, method: str, target: str, span: Span | None = None) -> Fault | None:
        """Return the first fault of this kind that befalls the request, and count it."""
        with self._lock:
            for fault in self._faults:
                if fault.kind == kind and fault.concerns(host, method, target, span):
                    if fault.left is not None:
                        fault.left -= 1
                    return fault
        return None
