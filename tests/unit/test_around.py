from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from sparkserve import around, state_file
from sparkserve.around import AroundFacts, GpuFacts
from sparkserve.cluster import Role
from sparkserve.engine_facts import Facts, Memory
from sparkserve.link import Interface, LinkFacts
from sparkserve.operate_tables import status_data, status_view
from sparkserve.operations import View
from sparkserve.status import Evidence, Verdict
from sparkserve.status_look import Status

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


def memory(available: int, swap_used: int = 0) -> dict[Role, Memory]:
    return {"head": Memory(128_000, available, swap_used)}


def test_a_trend_is_against_the_first_look_at_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, now = tmp_path / "trend.json", time.time()
    monkeypatch.setattr(time, "time", lambda: now)
    first = around.remember(path, "run-1", memory(10_000, 0), {"head": seen(rx_errors=5)})["head"]
    assert (first.memory_per_hour, first.swap_per_hour, first.new_errors) == (None, None, {})
    monkeypatch.setattr(time, "time", lambda: now + 60)
    soon = around.remember(path, "run-1", memory(9_000, 500), {"head": seen(rx_errors=5)})["head"]
    assert (soon.memory_per_hour, soon.swap_per_hour) == (None, None)
    monkeypatch.setattr(time, "time", lambda: now + 7200)
    late = around.remember(path, "run-1", memory(8_000, 600), {"head": seen(rx_errors=7, tx_errors=1)})["head"]
    assert (late.memory_per_hour, late.swap_per_hour, late.hours) == (-1000, 300, 2.0)
    assert late.new_errors == {"rx_errors": 2}
    other = around.remember(path, "run-2", memory(8_000, 600), {"head": seen(rx_errors=7)})["head"]
    assert (other.hours, other.new_errors) == (0.0, {})


def test_a_node_that_comes_later_begins_a_new_trend(tmp_path: Path) -> None:
    path = tmp_path / "trend.json"
    around.remember(path, "run-1", memory(1), {"head": seen()})
    both: dict[Role, Memory] = {**memory(1), "worker": Memory(2, 1, 0)}
    assert set(around.remember(path, "run-1", both, {"head": seen(), "worker": seen()})) == {"head", "worker"}


def test_a_first_look_that_an_earlier_version_kept_begins_a_new_trend(tmp_path: Path) -> None:
    path = tmp_path / "trend.json"
    state_file.write(path, {"run": "run-1", "time": 0, "nodes": {"head": {"available": 1, "errors": {}}}})
    assert around.remember(path, "run-1", memory(1), {"head": seen()})["head"].hours == 0.0


def test_a_disk_that_takes_nothing_costs_the_trend_only(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file in the way")
    found = around.remember(tmp_path / "state" / "trend.json", "run-1", memory(1), {"head": seen()})
    assert found == {"head": around.Trend(0.0, None, None, {})}


def test_a_status_shows_how_memory_and_swap_moved() -> None:
    trends: dict[Role, around.Trend] = {"head": around.Trend(2.0, -(2.0**30), 2.0**29, {})}
    facts: dict[Role, Facts] = {"head": Facts(0.0, Memory(128_000_000_000, 9_000_000_000, 2_000_000_000))}
    view = View(Status(Verdict("running", ("idle",)), facts, {}, Evidence()), None, trends=trends)
    table = status_view(view)[1]
    assert isinstance(table, Table)
    shown = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    assert shown["trend"] == ["-1.00 GiB/h over 2.0 h"]
    assert shown["swap used"] == ["2.0 GB (1.9 GiB), +0.50 GiB/h"]
    assert status_data(view)["nodes"]["head"]["trend"].swap_per_hour == 2.0**29
