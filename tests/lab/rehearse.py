"""The whole line on the two-node lab, as an owner types it: `python -m tests.lab.rehearse [vllm]`."""

from __future__ import annotations

import json
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

# The engine that the lab starts, and what it needs beyond the lab itself.
ENGINES: Mapping[str, Callable[[Pair], None]] = {"": lambda _pair: None, "vllm": vllm.furnish}
# What an owner types, and the exit code that is right at that point.
LINE = (
    (("config",), 0),
    (("lock",), 0),
    (("up", "--dry-run"), 0),
    (("up",), 0),
    (("up",), 0),
    (("status",), 0),
    (("verify",), 0),
    (("logs", "--rank", "0", "--grep", "ready|serving|startup complete"), 0),
    (("stop",), 0),
    (("status",), 5),
    (("stop",), 0),
)


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
    with paired() as pair:
        ENGINES[engine](pair)
        rows.append(Row("lab", "both", _describe_lab(pair), time.monotonic() - begun))
        good = all(_rehearse(pair, words, wanted, rows) for words, wanted in LINE)
    rows.append(Row("lab", "both", "taken down", 0.0))
    _show(rows, time.monotonic() - begun)
    return 0 if good else 1


def _describe_lab(pair: Pair) -> str:
    head, worker = pair.head, pair.worker
    return f"{head.hostname} and {worker.hostname}, link {head.link_address} to {worker.link_address}"


def _rehearse(pair: Pair, words: tuple[str, ...], wanted: int, rows: list[Row]) -> bool:
    print(f"\n$ sparkserve {' '.join(words)}", flush=True)
    begun = time.monotonic()
    with pair.head.popen(pair.command(*words), stdout=sys.stdout, stderr=sys.stderr) as process:
        code = process.wait(timeout=900)
    seconds = time.monotonic() - begun
    rows += _proofs(pair, words, seconds) if code == wanted else []
    if code != wanted:
        rows.append(Row(" ".join(words), "both", f"exit code {code} where {wanted} is right", seconds))
    return code == wanted


def _proofs(pair: Pair, words: tuple[str, ...], seconds: float) -> list[Row]:
    """Tell what the command proved; `up` keeps a record of each step."""
    name = " ".join(words)
    if name == "up" and (record := _last_run(pair)):
        return [Row(row["step"], row["node"], row["proof"], row["seconds"]) for row in record]
    return [Row(name, "both", "as it should be", seconds)]


def _last_run(pair: Pair) -> list[dict[str, Any]]:
    """Read the record of the last `up` that changed something, and take it away so that it counts once."""
    script = 'f=~/.local/state/sparkserve/last-run.json; cat "$f" && rm -f "$f"'
    answer = pair.head.run(["sh", "-c", script], check=False)
    found: list[dict[str, Any]] = json.loads(answer.stdout)["rows"] if answer.returncode == 0 else []
    return found


def _show(rows: list[Row], seconds: float) -> None:
    table = Table("step", "node", "proof", "seconds", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(row.step, row.node, Text(row.proof), f"{row.seconds:.1f}")
    print()
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"rehearsed in {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
