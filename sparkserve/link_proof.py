"""The proof of the cable, both ways: whole frames, TCP on the ranks' ports, and how much it carries."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkserve import engine_facts, link_program
from sparkserve.checks import Check
from sparkserve.cluster import ROLES, Cluster, Node, NodeSession, Role

if TYPE_CHECKING:
    from sparkserve.link import LinkFacts

FLOOR_GBPS = 5.0
_STREAMS = 4
_BYTES_EACH_WAY = 1 << 30
_SECONDS_EACH_WAY = 0.6
_SMALL = 100
_HEADERS = 28  # of IPv4 and UDP
_RDMA_SECONDS = 2
_DOCS = "docs/network.md"


@dataclass(frozen=True)
class End:
    """One end of the cable while it is proved: `tcp` and `udp` are its own ports, `held` tells of the meeting port."""

    role: Role
    link: LinkFacts
    session: NodeSession
    tcp: int
    udp: int
    held: str

    def ask(self, do: str, **fields: Any) -> Any:  # noqa: ANN401 - JSON out and in
        """Ask the end's program."""
        return self.session.ask(do, timeout=20, address=self.link.address, **fields)


def prove(
    cluster: Cluster,
    links: Mapping[Role, LinkFacts],
    *,
    master_port: int,
    floor: float = FLOOR_GBPS,
    is_idle: Callable[[], bool] = lambda: False,
) -> list[Check]:
    """Prove the cable within two and a half seconds; `floor` is in Gb/s.

    How much it carries is not measured while a pair of ours runs, unless `is_idle` knows that nobody waits for it.
    """
    unknown = [Check("link_tcp", role, "fail", *_UNKNOWN) for role in ROLES if not _is_known(links, role)]
    if unknown:
        return unknown
    facts, unseen = cluster.try_both(engine_facts.gather)
    runs = [role for role, found in facts.items() if any(one.is_running for one in found.containers)]
    with _open_ends(cluster, links, master_port) as (head, worker):
        checks = [prove_frames(head, worker), prove_frames(worker, head)]
        meeting = judge_meeting(head.held, master_port, ours="head" in runs)
        ports = (head.tcp, master_port) if not head.held else (head.tcp,)
        tcp = [*meeting, prove_tcp(head, worker, (worker.tcp,)), prove_tcp(worker, head, ports)]
        checks += tcp
        why = "a pair of ours runs, and is not disturbed" if runs else "Docker does not say whether a pair runs"
        if (runs or unseen) and not is_idle():
            return [*checks, _left_out(why, "a pair that is idle")]
        if any(check.verdict == "fail" for check in tcp[len(meeting) :]):
            return [*checks, _left_out("TCP does not come through", "TCP both ways")]
        checks += [prove_bandwidth(head, worker, floor), prove_bandwidth(worker, head, floor)]
        return [*checks, *prove_rdma(cluster, head, worker, floor)]


def _is_known(links: Mapping[Role, LinkFacts], role: Role) -> bool:
    return role in links and bool(links[role].interface)


_UNKNOWN = (
    "no interface owns the link address",
    "an interface on both nodes",
    "set SPARKSERVE_HEAD_LINK and SPARKSERVE_WORKER_LINK to the two ends of the cable",
)


def _left_out(why: str, needed: str) -> Check:
    return Check("link_bandwidth", "", "warn", f"not measured: {why}", needed, "later: `sparkserve link --prove`")


@contextmanager
def _open_ends(cluster: Cluster, links: Mapping[Role, LinkFacts], master_port: int) -> Iterator[tuple[End, End]]:
    """Open both ends; they end with this command, however it ends."""
    with ExitStack() as stack:

        def open_end(node: Node) -> End:
            session = NodeSession(node.host, link_program.__file__)
            stack.callback(session.close)
            found = session.ask("listen", timeout=20, address=links[node.role].address, port=master_port)
            return End(node.role, links[node.role], session, found["tcp"], found["udp"], found["held"])

        ends = cluster.on_both(open_end)
        yield ends["head"], ends["worker"]


# -- whole frames -----------------------------------------------------------------------------------------------------


def prove_frames(sender: End, receiver: End) -> Check:
    """Prove that a frame as long as the sender's MTU allows arrives in one piece."""
    sizes = [_SMALL, sender.link.mtu - _HEADERS]
    problems = sender.ask("send_datagrams", to=[receiver.link.address, receiver.udp], sizes=sizes)
    arrived = receiver.ask("datagrams", sizes=sizes)["sizes"]
    return judge_frames(sender.role, receiver.role, sender.link.mtu, arrived, problems)


def judge_frames(sender: Role, receiver: Role, mtu: int, arrived: list[int], problems: Mapping[str, str]) -> Check:
    """Judge what arrived of a small and of a whole frame."""
    needed = f"frames of {mtu} bytes in one piece"
    whole = mtu - _HEADERS
    if whole in arrived:
        return Check("link_mtu_path", sender, "ok", f"a frame of {mtu} bytes reaches the {receiver} whole", needed)
    if _SMALL in arrived:
        why = problems.get(str(whole), "lost on the way")
        observed = f"frames of {mtu} bytes do not reach the {receiver} ({why}), small ones do"
        hint = f"set the same MTU on both ends in netplan, see {_DOCS}; a switch between them must take it, too"
        return Check("link_mtu_path", sender, "fail", observed, needed, hint)
    why = problems.get(str(_SMALL), "no answer")
    observed = f"no datagram reaches the {receiver} ({why})"
    hint = f"is the cable in, and does a firewall of the {receiver} let UDP in? `sudo nft list ruleset` there"
    return Check("link_mtu_path", sender, "fail", observed, needed, hint)


# -- TCP --------------------------------------------------------------------------------------------------------------


def judge_meeting(held: str, port: int, *, ours: bool) -> list[Check]:
    """Judge a meeting port that could not be opened on the head; by our own engine it is held with right."""
    if not held:
        return []
    needed = "a port that the ranks can meet on"
    if ours:
        return [Check("link_tcp", "head", "ok", f"port {port} (rendezvous) is held by ours", needed)]
    observed = f"port {port} (rendezvous) cannot be opened: {held}"
    hint = f"sudo ss -ltnp 'sport = :{port}' shows who holds it; or set SPARKSERVE_MASTER_PORT"
    return [Check("link_tcp", "head", "fail", observed, needed, hint)]


def prove_tcp(dialer: End, listener: End, ports: tuple[int, ...]) -> Check:
    """Prove that the other end can be connected to: the first port is a random high one, a second the meeting port."""
    answers = dialer.ask("connect", to=listener.link.address, ports=list(ports))
    names = {str(port): name for port, name in zip(ports, ("a random high one", "rendezvous"), strict=False)}
    return judge_tcp(dialer.role, listener, {f"{port} ({names[port]})": why for port, why in answers.items()})


def judge_tcp(dialer: Role, listener: End, answers: Mapping[str, str]) -> Check:
    """Judge what became of the connections; no answer at all is what a firewall gives."""
    needed = f"TCP to the {listener.role} on every port: NCCL takes random ones"
    wrong = {port: why for port, why in answers.items() if why}
    if not wrong:
        observed = f"the {listener.role} answers on {' and '.join(sorted(answers))}"
        return Check("link_tcp", dialer, "ok", observed, needed)
    observed = f"to the {listener.role}: " + ", ".join(f"port {port}: {why}" for port, why in sorted(wrong.items()))
    interface = listener.link.interface
    hint = f"a firewall? on the {listener.role}: `sudo ufw allow in on {interface}`, or `sudo nft list ruleset`"
    return Check("link_tcp", dialer, "fail", observed, needed, hint)


# -- how much it carries ----------------------------------------------------------------------------------------------


def prove_bandwidth(sender: End, receiver: End, floor: float) -> Check:
    """Measure TCP one way, from memory to nowhere, as the receiver counts it."""
    limits = {"streams": _STREAMS, "bytes": _BYTES_EACH_WAY, "seconds": _SECONDS_EACH_WAY}
    sender.ask("send", to=[receiver.link.address, receiver.tcp], **limits)
    found = receiver.ask("received")
    gbps = found["bytes"] * 8e-9 / found["seconds"] if found["seconds"] > 0 else 0.0
    way = f"to the {receiver.role} by TCP in {_STREAMS} streams"
    return _judge_rate("link_bandwidth", sender, (gbps, way), floor)


def _judge_rate(name: str, sender: End, measured: tuple[float, str], floor: float) -> Check:
    gbps, way = measured
    cable = f"; the port says {sender.link.cable_mbps / 1000:g}" if sender.link.cable_mbps else ""
    observed, needed = f"{gbps:.1f} Gb/s {way}", f"{floor:g} Gb/s{cable}"
    if gbps >= floor:
        return Check(name, sender.role, "ok", observed, needed)
    hint = f"MTU 9000 on both ends, and both halves of the port up? a reboot has cured slow links; see {_DOCS}"
    return Check(name, sender.role, "fail", observed, needed, hint)


def prove_rdma(cluster: Cluster, head: End, worker: End, floor: float) -> list[Check]:
    """Measure RDMA from the head to the worker over each half of the port, where perftest is on both nodes."""
    halves = list(zip(head.link.hcas, worker.link.hcas, strict=False))
    if not halves or None in (head.link.gid_index, worker.link.gid_index):
        return []
    tool = "ib_write_bw"
    found = cluster.on_both(lambda node: node.session.ask("facts", tools=[tool])["tools"][tool])
    missing = [role for role, path in found.items() if path is None]
    if missing:
        observed = f"not measured: {tool} is not on the {' and the '.join(missing)}"
        return [Check("link_rdma_bandwidth", "", "warn", observed, tool, "sudo apt-get install perftest")]
    return [_prove_half(head, worker, half, floor) for half in halves]


def _prove_half(head: End, worker: End, half: tuple[str, str], floor: float) -> Check:
    port = random.randint(20000, 29999)  # noqa: S311 - a port, not a secret
    common = ["-F", "-p", str(port), "-D", str(_RDMA_SECONDS), "--report_gbits"]
    with ThreadPoolExecutor(1) as aside:
        end = {"seconds": _RDMA_SECONDS + 6}
        server = aside.submit(worker.ask, "run", argv=_perftest(worker, half[1], common), **end)
        argv = [*_perftest(head, half[0], common), worker.link.address]
        answer = None
        while not server.done():  # the server takes a moment until it listens
            answer = head.ask("run", argv=argv, **end)
            if answer is None or answer["code"] == 0:
                break
    gbps = parse_perftest(answer["out"]) if answer else None
    if gbps is not None:
        return _judge_rate("link_rdma_bandwidth", head, (gbps, f"from {half[0]} to {half[1]} by RDMA"), floor)
    words = answer["err"] or answer["out"] if answer else ""
    observed = f"{half[0]} moves nothing to {half[1]}: {(words.strip().splitlines() or ['no end in time'])[-1]}"
    hint = "are MTU, GID index and path of both ends right? `sparkserve link` shows them"
    return Check("link_rdma_bandwidth", "head", "fail", observed, f"{floor:g} Gb/s", hint)


def _perftest(end: End, device: str, common: list[str]) -> list[str]:
    return ["ib_write_bw", "-d", device, "-x", str(end.link.gid_index), *common]


def parse_perftest(text: str) -> float | None:
    """Take the average from perftest's table, in Gb/s: bytes, iterations, peak, average, message rate."""
    _, _, table = text.partition("BW average[Gb/sec]")
    match = re.search(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)(\s|$)", table, re.MULTILINE)
    return float(match[1]) if match else None
