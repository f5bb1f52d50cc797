"""The proof of the cable, both ways: whole frames, TCP on the ranks' ports, and how much it carries."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkserve import link_program, system, takeover_facts
from sparkserve.checks import Check, verdict
from sparkserve.cluster import ROLES, Cluster, Node, NodeSession, Role
from sparkserve.errors import SparkserveError

if TYPE_CHECKING:
    from sparkserve.link import LinkFacts

FLOOR_GBPS = 5.0
_STREAMS = 4
# With the four measurements of RDMA no more than two seconds at the floor, and two GiB.
_BYTES_EACH_WAY = 1 << 29
_SECONDS_EACH_WAY = 0.5
_SMALL = 100
_HEADERS = 28  # of IPv4 and UDP
# Over each half of the port, each way; perftest sends it as so many messages.
_RDMA_BYTES = 1 << 27
_RDMA_MESSAGE = 1 << 16
_RDMA_PATIENCE = 6


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
    """Prove the cable within two and a half seconds; `floor` is in Gb/s. Where that breaks off, the rest is unseen.

    How much it carries is not measured while a pair runs, unless it is ours and `is_idle` knows that nobody waits.
    """
    unknown = [role for role in ROLES if role not in links or not links[role].interface]
    if unknown:
        seen, hint = "no interface owns the link address", "`sparkserve link` shows what may be the cable"
        return [Check("link_tcp", role, "fail", seen, "an interface on both nodes", hint) for role in unknown]
    found: list[Check] = []
    try:
        for check in _prove_all(cluster, links, master_port, floor, is_idle):
            found.append(check)
    except SparkserveError as error:
        proved = {(check.id, check.node) for check in found}
        names = ["link_mtu_path", "link_tcp", *_names_of_rates(links["head"], links["worker"])]
        needed = "both ends of the cable, by a program"
        found += [
            Check(name, error.node, "unseen", str(error), needed, error.hint)
            for name in names
            if any((name, role) not in proved for role in ROLES)
        ]
    return found


def _prove_all(
    cluster: Cluster, links: Mapping[Role, LinkFacts], master_port: int, floor: float, is_idle: Callable[[], bool]
) -> Iterator[Check]:
    """Prove one thing after the other; what is known stays so, whatever becomes of the next."""
    users, unseen = cluster.try_both(see_users)
    ours = [role for role, (is_ours, _) in users.items() if is_ours]
    theirs = dict.fromkeys(name for _, names in users.values() for name in names)
    with _open_ends(cluster, links, master_port) as (head, worker):
        yield prove_frames(head, worker)
        yield prove_frames(worker, head)
        yield from judge_meeting(head.held, master_port, ours="head" in ours)
        ports = (head.tcp, master_port) if not head.held else (head.tcp,)
        yield (there := prove_tcp(head, worker, (worker.tcp,)))
        yield (back := prove_tcp(worker, head, ports))
        runs = "a pair of ours runs" if ours and not theirs else f"{', '.join(theirs)} may use the cable"
        why = f"{runs}, and is not disturbed" if ours or theirs else "Docker does not say whether a pair runs"
        if theirs or ((ours or unseen) and not is_idle()):
            yield from _leave_out(head, worker, why, "a pair that is idle")
        elif "fail" in (there.verdict, back.verdict):
            yield from _leave_out(head, worker, "TCP does not come through", "TCP both ways")
        else:
            yield prove_bandwidth(head, worker, floor)
            yield prove_bandwidth(worker, head, floor)
            yield from prove_rdma(cluster, head, worker, floor)


def _leave_out(head: End, worker: End, why: str, needed: str) -> list[Check]:
    names, hint = _names_of_rates(head.link, worker.link), "later: `sparkserve link --prove`"
    return [Check(name, "", "unseen", f"not measured: {why}", needed, hint) for name in names]


def _names_of_rates(head: LinkFacts, worker: LinkFacts) -> list[str]:
    return ["link_bandwidth", *(["link_rdma_bandwidth"] if _pair_halves(head, worker) else [])]


def see_users(node: Node) -> tuple[bool, list[str]]:
    """See who may use the cable: whether a rank of ours runs, and by name whatever of others could be one of a pair."""
    running, facts = takeover_facts.gather(node).running, system.gather(node)
    theirs = [one.name for one in running if not one.is_ours and _may_use_cable(one)]
    theirs += [one.container or f"{one.name} (process {one.pid})" for one in facts.gpu_processes or () if not one.ours]
    if facts.gpu_processes is None and facts.gpu_error != "missing":
        theirs.append("a process that nvidia-smi does not tell of")
    return any(one.is_ours for one in running), theirs


def _may_use_cable(one: takeover_facts.Running) -> bool:
    return one.options["network_mode"] == "host" or any(what != "the GPU" for what in one.devices_of_a_rank)


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
        return Check("link_mtu_path", sender, "fail", observed, needed)
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
    return Check(name, sender.role, verdict(good=gbps >= floor), f"{gbps:.1f} Gb/s {way}", f"{floor:g} Gb/s{cable}")


def prove_rdma(cluster: Cluster, head: End, worker: End, floor: float) -> Iterator[Check]:
    """Measure RDMA both ways over each half of the port, where perftest is on both nodes, until one has no end."""
    halves = _pair_halves(head.link, worker.link)
    if not halves:
        return
    tool = "ib_write_bw"
    found = cluster.on_both(lambda node: node.session.ask("facts", tools=[tool])["tools"][tool])
    missing = [role for role, path in found.items() if path is None]
    if missing:
        observed = f"not measured: {tool} is not on the {' and the '.join(missing)}"
        yield Check("link_rdma_bandwidth", "", "warn", observed, tool, "sudo apt-get install perftest")
        return
    there = [((head, ours), (worker, theirs)) for ours, theirs in halves]
    ways = [*there, *((target, source) for source, target in there)]
    for number, (source, target) in enumerate(ways, 1):
        begun = time.monotonic()
        check = _prove_half(source, target, floor)
        if time.monotonic() - begun >= _RDMA_PATIENCE and number < len(ways):  # a dead path is waited for once
            yield replace(check, observed=f"{check.observed}; other halves and ways not tried")
            return
        yield check


def _pair_halves(head: LinkFacts, worker: LinkFacts) -> list[tuple[str, str]]:
    """Pair the RDMA devices of both ends; none where one end has no address for RDMA."""
    if None in (head.gid_index, worker.gid_index):
        return []
    return list(zip(head.hcas, worker.hcas, strict=False))


def _prove_half(source: tuple[End, str], target: tuple[End, str], floor: float) -> Check:
    (sender, ours), (receiver, theirs) = source, target
    port = random.randint(20000, 29999)  # noqa: S311 - a port, not a secret
    amount = ["-s", str(_RDMA_MESSAGE), "-n", str(_RDMA_BYTES // _RDMA_MESSAGE)]
    common = ["-F", "-p", str(port), *amount, "--report_gbits"]
    answer = None
    with ThreadPoolExecutor(1) as aside:
        server = aside.submit(receiver.ask, "run", argv=_perftest(receiver, theirs, common), seconds=_RDMA_PATIENCE)
        argv = [*_perftest(sender, ours, common), receiver.link.address]
        while not server.done():  # the server takes a moment until it listens
            answer = sender.ask("run", argv=argv, seconds=_RDMA_PATIENCE)
            if answer is None or answer["code"] == 0:
                break
            time.sleep(0.05)
    gbps = parse_perftest(answer["out"]) if answer else None
    if gbps is not None:
        return _judge_rate("link_rdma_bandwidth", sender, (gbps, f"from {ours} to {theirs} by RDMA"), floor)
    words = answer["err"] or answer["out"] if answer else ""
    observed = f"{ours} moves nothing to {theirs}: {(words.strip().splitlines() or ['no end in time'])[-1]}"
    return Check("link_rdma_bandwidth", sender.role, "fail", observed, f"{floor:g} Gb/s")


def _perftest(end: End, device: str, common: list[str]) -> list[str]:
    return ["ib_write_bw", "-d", device, "-x", str(end.link.gid_index), *common]


def parse_perftest(text: str) -> float | None:
    """Take the average from perftest's table, in Gb/s: bytes, iterations, peak, average, message rate."""
    _, _, table = text.partition("BW average[Gb/sec]")
    match = re.search(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)(\s|$)", table, re.MULTILINE)
    return float(match[1]) if match else None
