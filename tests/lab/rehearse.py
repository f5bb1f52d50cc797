"""The whole line on the two-node lab, as an owner types it: `python -m tests.lab.rehearse [vllm]`."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tests.lab import vllm
from tests.lab.pair import Pair, paired


@dataclass(frozen=True)
class Typed:
    """What an owner types (WORKER being the address), the exit code that is right there, and what it has to show.

    That is steps of its tables, "verify" for the table of proofs, or the word with which its first line begins.
    """

    words: tuple[str, ...]
    code: int = 0
    shows: tuple[str, ...] = ()


MADE = ("download", "sync", "template", "build", "ship", "tune", "start", "verify")
FROM_NOTHING = (
    Typed(("doctor", "WORKER")),
    Typed(("init", "WORKER", "--yes", "--force")),
    Typed(("link",)),
    Typed(("config",)),
    Typed(("lock",)),
    Typed(("up", "--dry-run")),
    Typed(("up",), shows=MADE),
    Typed(("up",), shows=("No changes", "verify")),
    Typed(("status",), shows=("running",)),
    Typed(("verify",), shows=("verify",)),
    Typed(("connect",)),
)
# Not of sparkserve: typed on the worker.
KILL = ("docker", "kill", "sparkserve-rank1")
A_DEATH = (
    Typed(KILL),
    Typed(("status",), 5, shows=("degraded",)),
    Typed(("start",), shows=("start",)),
    Typed(("status",), shows=("running",)),
)
TO_NOTHING = (
    Typed(("logs", "--rank", "0", "--grep", "ready|serving|startup complete")),
    Typed(("stop",), shows=("stop",)),
    Typed(("status",), 5, shows=("stopped",)),
    Typed(("stop",), shows=("nothing of ours was running",)),
)
# The engine that the lab starts: what it needs beyond the lab itself, and what is typed.
ENGINES: Mapping[str, tuple[Callable[[Pair], None], tuple[Typed, ...]]] = {
    "": (lambda _pair: None, (*FROM_NOTHING, *TO_NOTHING)),
    "vllm": (vllm.furnish, (*FROM_NOTHING, *A_DEATH, *TO_NOTHING)),
}
# What changes something shows it in tables with these headings.
SUMMARY = ("step", "node", "proof", "time")
PROOFS = ("proof", "verdict", "observed", "needed", "time")
# What only looks is asked once more, for its data, and that comes down to this.
LOOKS: Mapping[str, Callable[[Any], str]] = {
    "config": lambda data: f"{len(data['settings'])} settings",
    "link": lambda data: f"drawn, {len(data['odd']) or 'nothing'} odd",
    "lock": lambda data: (
        f"{len(data['rows'])} sources resolved, with {sum(row['files'] for row in data['rows'])} files"
    ),
    "connect": lambda data: f"base URL {data['base_url']}",
}


@dataclass(frozen=True)
class Row:
    """One line of the closing table."""

    step: str
    node: str
    proof: str
    seconds: float


def main() -> int:
    """Rehearse and end with one table: step, node, proof, seconds."""
    engine = "".join(sys.argv[1:])
    if engine not in ENGINES:
        print(f"no engine {engine}; there is: {', '.join(filter(None, ENGINES))}, or none for the stand-in")
        return 2
    begun = time.monotonic()
    rows: list[Row] = []
    furnish, line = ENGINES[engine]
    with paired() as pair:
        furnish(pair)
        rows.append(Row("lab", "both", _describe_lab(pair), time.monotonic() - begun))
        good = all(_rehearse(pair, typed, rows) for typed in line)
    rows.append(Row("lab", "both", "taken down", 0.0))
    _show(rows, time.monotonic() - begun)
    return 0 if good else 1


def _describe_lab(pair: Pair) -> str:
    head, worker = pair.head, pair.worker
    return f"{head.hostname} and {worker.hostname}, link {head.link_address} to {worker.link_address}"


def _rehearse(pair: Pair, typed: Typed, rows: list[Row]) -> bool:
    if typed.words == KILL:
        return _kill(pair, rows)
    words, step = typed.words, " ".join(typed.words)
    print(f"\n$ sparkserve {step}", flush=True)
    begun, lines = time.monotonic(), []
    argv = pair.command(*(word.replace("WORKER", pair.worker.management_address) for word in words))
    with pair.head.popen(argv, stdout=subprocess.PIPE, stderr=sys.stderr) as process:
        for line in process.stdout or ():
            print(line.decode(), end="", flush=True)
            lines.append(line.decode().rstrip("\n"))
        code = process.wait(timeout=900)
    seconds = time.monotonic() - begun
    if code != typed.code:
        rows.append(Row(step, "both", f"exit code {code} where {typed.code} is right", seconds))
    elif look := LOOKS.get(words[0]):
        rows.append(Row(step, "both", look(pair.ask(*words)["data"]), seconds))
    else:
        rows += _proofs(words, lines, seconds)
    missing = [
        Row(wanted, "both", f"not shown by {step}", seconds) for wanted in typed.shows if not shows(lines, wanted)
    ]
    rows += missing
    return code == typed.code and not missing


def _kill(pair: Pair, rows: list[Row]) -> bool:
    print(f"\nworker$ {' '.join(KILL)}", flush=True)
    begun = time.monotonic()
    killed = pair.worker.docker(*KILL[1:]).strip()
    rows.append(Row(" ".join(KILL), "worker", f"{killed} killed", time.monotonic() - begun))
    return True


def shows(lines: list[str], wanted: str) -> bool:
    """Tell whether a command showed a step in its tables, or the words with which its first line begins."""
    steps = {row[0] for row in read_table(lines, *SUMMARY)}
    if wanted == "verify":
        return bool(read_table(lines, *PROOFS))
    return wanted in steps or lines[:1] == [wanted] or "".join(lines[:1]).startswith(f"{wanted}:")


def _proofs(words: tuple[str, ...], lines: list[str], seconds: float) -> list[Row]:
    """Tell what the command showed: the rows of its own summary, else what its result comes down to."""
    lines = lines or ["nothing"]
    steps = read_table(lines, *SUMMARY)
    done = [Row(step, node, proof, float(spent.removesuffix(" s") or 0)) for step, node, proof, spent in steps]
    proved = ", ".join(f"{proof} {verdict}" for proof, verdict, *_ in read_table(lines, *PROOFS))
    if words[0] == "up" and proved:
        return [*(done or [Row("up", "both", lines[0], seconds)]), Row("verify", "head", proved, 0.0)]
    last = lines[-1].strip()
    shown = {"doctor": last, "init": last, "up": last, "verify": proved, "logs": f"{len(lines)} lines: {last}"}
    return done or [Row(" ".join(words), "both", shown.get(words[0], lines[0]), seconds)]


def read_table(lines: list[str], *columns: str) -> list[list[str]]:
    """Read the rows below this heading, up to what does not keep to its columns."""
    for number, line in enumerate(lines):
        if re.split(r"\s{2,}", line.strip()) == list(columns):
            starts = [line.index(column) for column in columns]
            spans = list(itertools.pairwise([*starts, None]))
            padded = [row.ljust(starts[-1]) for row in lines[number + 1 :]]  # a pipe gets no blanks at the end
            below = ([row[start:end] for start, end in spans] for row in padded)
            rows = itertools.takewhile(lambda row: row[1].strip() and all(c[-2:].isspace() for c in row[:-1]), below)
            return [[cell.strip() for cell in row] for row in rows]
    return []


def _show(rows: list[Row], seconds: float) -> None:
    table = Table("step", "node", "proof", "seconds", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(row.step, row.node, Text(row.proof), f"{row.seconds:.1f}")
    print()
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"rehearsed in {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
