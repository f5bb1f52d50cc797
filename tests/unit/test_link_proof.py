"""What the proof of the cable concludes from what was seen."""

from __future__ import annotations

from typing import Any

import pytest

from sparkserve.checks import Check
from sparkserve.link import LinkFacts
from sparkserve.link_proof import End, judge_frames, judge_meeting, judge_tcp, parse_perftest, prove_bandwidth
from sparkserve.link_rdma import RdmaDevice

DEVICE = RdmaDevice("rocep1s0f1", "enp1s0f1np1", active=True, gids=(), rate_mbps=200_000)
LINK = LinkFacts("10.0.0.1", "enp1s0f1np1", ("rocep1s0f1",), 3, "", 9000, 100_000, (), (DEVICE,))


class Program:
    """An end's program that gives scripted answers, in order, and nothing else."""

    def __init__(self, *answers: tuple[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def ask(self, do: str, *, timeout: float, **fields: Any) -> Any:
        assert timeout < 60
        wanted, answer = self.answers.pop(0)
        assert do == wanted
        self.asked.append(fields)
        return answer


def end(role: Any, *answers: tuple[str, Any], link: LinkFacts = LINK) -> End:
    program: Any = Program(*answers)
    return End(role, link, program, tcp=40001, udp=40002, held="")


def said(check: Check) -> tuple[str, str, str, str]:
    return check.id, check.node, check.verdict, check.observed


@pytest.mark.parametrize(
    ("arrived", "problems", "verdict", "observed"),
    [
        ([100, 8972], {}, "ok", "a frame of 9000 bytes reaches the worker whole"),
        ([8972], {}, "ok", "a frame of 9000 bytes reaches the worker whole"),
        ([100], {}, "fail", "frames of 9000 bytes do not reach the worker (lost on the way), small ones do"),
        ([100], {"8972": "too long for this end"}, "fail",
         "frames of 9000 bytes do not reach the worker (too long for this end), small ones do"),
        ([], {}, "fail", "no datagram reaches the worker (no answer)"),
        ([], {"100": "Network is unreachable"}, "fail", "no datagram reaches the worker (Network is unreachable)"),
    ],
)  # fmt: skip
def test_frames(arrived: list[int], problems: dict[str, str], verdict: str, observed: str) -> None:
    check = judge_frames("head", "worker", 9000, arrived, problems)
    assert said(check) == ("link_mtu_path", "head", verdict, observed)
    assert bool(check.advice) is (verdict == "fail")


def test_the_meeting_port() -> None:
    assert judge_meeting("", 29551, ours=False) == []
    (ours,) = judge_meeting("Address already in use", 29551, ours=True)
    assert said(ours) == ("link_tcp", "head", "ok", "port 29551 (rendezvous) is held by ours")
    (theirs,) = judge_meeting("Address already in use", 29551, ours=False)
    assert said(theirs)[2:] == ("fail", "port 29551 (rendezvous) cannot be opened: Address already in use")
    assert "SPARKSERVE_MASTER_PORT" in theirs.hint


def test_tcp() -> None:
    good = judge_tcp("worker", end("head"), {"40001 (a random high one)": "", "29551 (rendezvous)": ""})
    assert said(good)[1:] == ("worker", "ok", "the head answers on 29551 (rendezvous) and 40001 (a random high one)")
    bad = judge_tcp("worker", end("head"), {"40001 (a random high one)": "no answer", "29551 (rendezvous)": ""})
    assert said(bad)[2:] == ("fail", "to the head: port 40001 (a random high one): no answer")
    assert bad.hint.startswith("a firewall? on the head: `sudo ufw allow in on enp1s0f1np1`")


@pytest.mark.parametrize(
    ("received", "floor", "verdict", "observed"),
    [
        ({"bytes": 1_250_000_000, "seconds": 1.0}, 5.0, "ok", "10.0 Gb/s to the worker by TCP in 4 streams"),
        ({"bytes": 1_250_000_000, "seconds": 1.0}, 10.0, "ok", "10.0 Gb/s to the worker by TCP in 4 streams"),
        ({"bytes": 125_000_000, "seconds": 1.0}, 5.0, "fail", "1.0 Gb/s to the worker by TCP in 4 streams"),
        ({"bytes": 0, "seconds": 0.0}, 5.0, "fail", "0.0 Gb/s to the worker by TCP in 4 streams"),
    ],
)
def test_bandwidth(received: dict[str, float], floor: float, verdict: str, observed: str) -> None:
    head, worker = end("head", ("send", {})), end("worker", ("received", received))
    check = prove_bandwidth(head, worker, floor)
    assert said(check) == ("link_bandwidth", "head", verdict, observed)
    assert check.needed == f"{floor:g} Gb/s; the port says 200"


# As perftest prints it, the warning between header and row included.
TABLE = """---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : rocep1s0f1
 Mtu             : 4096[B]
 GID index       : 3
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x008a PSN 0xfffb6d RKey 0x238f86 VAddr 0x007dd5a3cfd000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:100:08:01
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
Conflicting CPU frequency values detected: 1500.000000 != 3300.016000. CPU Frequency is not max.
 65536      560845           0.00               98.02                0.186950
---------------------------------------------------------------------------------------
"""


@pytest.mark.parametrize(
    ("text", "gbps"),
    [
        (TABLE, 98.02),
        (" #bytes #iterations BW peak[Gb/sec] BW average[Gb/sec]\n 65536 5000 13.1 12.9", 12.9),
        (TABLE.replace("Gb/sec", "MB/sec"), None),
        (TABLE.partition(" #bytes")[0], None),
        ("Couldn't connect to 10.100.8.2:18515\n", None),
        ("", None),
    ],
    ids=["duration", "short", "other unit", "cut off", "not connected", "nothing"],
)
def test_perftest(text: str, gbps: float | None) -> None:
    assert parse_perftest(text) == gbps
