"""What surrounds a serving pair: each node's GPU, the cable's counters, how memory and swap moved in this run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkserve import state_file
from sparkserve.cluster import Node, Role

if TYPE_CHECKING:
    from sparkserve.engine_facts import Memory
    from sparkserve.link import LinkFacts

_ASK_SECONDS = 4.0
_GPU = ("clocks.sm", "power.draw", "temperature.gpu", "utilization.gpu")
_QUERY = ["timeout", "2", "nvidia-smi", f"--query-gpu={','.join(_GPU)}", "--format=csv,noheader,nounits"]
_NET = "/sys/class/net/*/statistics/{name}"
_RDMA = "/sys/class/infiniband/*/ports/1/counters/{name}"
_GLOBS = (
    *(_NET.format(name=name) for name in ("rx_errors", "tx_errors", "rx_dropped", "tx_dropped")),
    *(_RDMA.format(name=name) for name in ("link_downed", "symbol_error", "port_rcv_errors", "port_xmit_discards")),
)
# A trend over less says nothing.
_TREND_SECONDS = 600.0


@dataclass(frozen=True)
class GpuFacts:
    """MHz, watts, degrees and per cent; None where nvidia-smi does not say."""

    clock_mhz: float | None
    power_watts: float | None
    temperature: float | None
    busy_percent: float | None


@dataclass(frozen=True)
class AroundFacts:
    """One node's surroundings; without `gpu` nvidia-smi gave no answer, `errors` count those of the cable's devices."""

    gpu: GpuFacts | None
    interface: str
    up: bool
    speed_mbps: int | None
    errors: Mapping[str, int] = field(default_factory=dict)


def gather(node: Node) -> dict[str, Any]:
    """Look at a node's GPU and at the counters of its network devices; `parse` takes those of the cable."""
    raw: dict[str, Any] = node.session.ask("facts", timeout=_ASK_SECONDS, commands={"gpu": _QUERY}, globs=list(_GLOBS))
    return raw


def parse(raw: Mapping[str, Any], link: LinkFacts) -> AroundFacts:
    """Give raw facts their types; only counters of the cable's own devices count."""
    own = {link.interface, link.twin, *link.hcas} - {""}
    counters = {path: text for found in raw["globs"].values() for path, text in found.items()}
    errors: dict[str, int] = {}
    for path, text in counters.items():
        device, name = path.split("/")[4], path.rsplit("/", 1)[1]
        if device in own and (text or "").strip().isdigit():
            errors[f"{device} {name}"] = int((text or "").strip())
    up = any(one.up for one in link.interfaces if one.name == link.interface)
    return AroundFacts(parse_gpu(raw["commands"]["gpu"]), link.interface, up, link.speed_mbps, errors)


def parse_gpu(answer: Mapping[str, Any] | None) -> GpuFacts | None:
    """Read nvidia-smi's line of the first GPU."""
    if answer is None or answer["code"] != 0 or not answer["out"].strip():
        return None
    words = [word.strip() for word in answer["out"].strip().splitlines()[0].split(",")]
    if len(words) != len(_GPU):
        return None
    return GpuFacts(*(_number(word) for word in words))


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # "[N/A]"
        return None


# -- how it moved -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trend:
    """How a node changed since the first look at this run: bytes per hour, and each error counter that grew."""

    hours: float
    memory_per_hour: float | None
    swap_per_hour: float | None
    new_errors: Mapping[str, int]


def remember(
    path: Path, run: str, memory: Mapping[Role, Memory], around: Mapping[Role, AroundFacts]
) -> dict[Role, Trend]:
    """Compare with the first look at this run, which is kept for those to come."""
    now = time.time()
    mine = {
        role: {"available": memory[role].available, "swap": memory[role].swap_used, "errors": dict(around[role].errors)}
        for role in around
    }
    first = state_file.read(path)
    if first.get("run") != run or _fields(first["nodes"]) != _fields(mine):
        first = {"run": run, "time": now, "nodes": mine}
        with contextlib.suppress(OSError):  # a disk that takes nothing costs the trend, not the look
            state_file.write(path, first)
    return {role: _trend(first["nodes"][role], mine[role], now - first["time"]) for role in mine}


def _fields(nodes: Mapping[Role, Mapping[str, Any]]) -> dict[Role, set[str]]:
    return {role: set(kept) for role, kept in nodes.items()}


def _trend(first: Mapping[str, Any], last: Mapping[str, Any], seconds: float) -> Trend:
    grown = {name: count - first["errors"].get(name, count) for name, count in last["errors"].items()}
    hours, says_something = seconds / 3600, seconds >= _TREND_SECONDS
    memory, swap = ((last[name] - first[name]) / hours if says_something else None for name in ("available", "swap"))
    return Trend(hours, memory, swap, {name: count for name, count in grown.items() if count > 0})
