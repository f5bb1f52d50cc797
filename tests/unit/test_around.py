from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from sparkserve import around
from sparkserve.around import AroundFacts, GpuFacts
from sparkserve.link import Interface, LinkFacts

OWN = Interface("enp1s0f1np1", ("10.0.0.1",), 9000, up=True, speed_mbps=200_000)
LINK = LinkFacts("10.0.0.1", "enp1s0f1np1", ("rocep1s0f1",), 3, "enP2p1s0f1np1", 9000, 200_000, (OWN,))


def answer(text: str, code: int = 0) -> dict[str, Any]:
    return {"code": code, "out": text, "err": ""}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (answer("2405, 81.32, 71, 96\n"), GpuFacts(2405, 81.32, 71, 96)),
        (answer("208, [N/A], 42, 0\n"), GpuFacts(208, None, 42, 0)),
        (answer("1, 2, 3, 4\n5, 6, 7, 8\n"), GpuFacts(1, 2, 3, 4)),
        (answer("", 9), None),
        (answer("NVIDIA-SMI has failed\n"), None),
        (answer("", 124), None),
        (None, None),
    ],
)
def test_what_nvidia_smi_says(given: Any, expected: GpuFacts | None) -> None:
    assert around.parse_gpu(given) == expected


def test_only_the_cables_own_counters_count() -> None:
    files = {
        "/sys/class/net/enp1s0f1np1/statistics/rx_errors": "3\n",
        "/sys/class/net/enP2p1s0f1np1/statistics/rx_errors": "0\n",
        "/sys/class/net/eth0/statistics/rx_errors": "99\n",
        "/sys/class/infiniband/rocep1s0f1/ports/1/counters/link_downed": "1\n",
        "/sys/class/infiniband/rocep9s0f0/ports/1/counters/link_downed": "7\n",
        "/sys/class/infiniband/rocep1s0f1/ports/1/counters/symbol_error": None,
    }
    found = around.parse({"globs": {"*": files}, "commands": {"gpu": None}}, LINK)
    assert found == AroundFacts(
        None,
        "enp1s0f1np1",
        up=True,
        speed_mbps=200_000,
        errors={"enp1s0f1np1 rx_errors": 3, "enP2p1s0f1np1 rx_errors": 0, "rocep1s0f1 link_downed": 1},
    )


def seen(**errors: int) -> AroundFacts:
    return AroundFacts(None, "x", up=True, speed_mbps=None, errors=errors)


def test_a_trend_is_against_the_first_look_at_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "trend.json", time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    first = around.remember(path, "run-1", {"head": 10_000}, {"head": seen(rx_errors=5)})
    assert (first["head"].memory_per_hour, first["head"].new_errors) == (None, {})
    monkeypatch.setattr(time, "time", lambda: now + 60)
    assert around.remember(path, "run-1", {"head": 9_000}, {"head": seen(rx_errors=5)})["head"].memory_per_hour is None
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    late = around.remember(path, "run-1", {"head": 8_000}, {"head": seen(rx_errors=7, tx_errors=1)})["head"]
    assert (late.memory_per_hour, late.hours, late.new_errors) == (-1000, 2.0, {"rx_errors": 2})
    other = around.remember(path, "run-2", {"head": 8_000}, {"head": seen(rx_errors=7)})["head"]
    assert (other.hours, other.new_errors) == (0.0, {})


def test_a_node_that_comes_later_begins_a_new_trend(tmp_path: Path) -> None:
    path = tmp_path / "trend.json"
    around.remember(path, "run-1", {"head": 1}, {"head": seen()})
    both = around.remember(path, "run-1", {"head": 1, "worker": 1}, {"head": seen(), "worker": seen()})
    assert set(both) == {"head", "worker"}
