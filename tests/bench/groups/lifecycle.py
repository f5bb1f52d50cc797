"""Starting, looking and stopping on the two-node lab, beside what the same containers take by hand."""

from __future__ import annotations

import compileall
import json
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.bench import peer
from tests.bench.figures import Figure, connections
from tests.bench.stream import OURS, TOKENS_PER_SECOND, percent_lost
from tests.e2e.watching import watching
from tests.lab.node import LabNode
from tests.lab.pair import SOURCE, Pair, paired

RUNS = 5
INSTANT = {"load_seconds_first": 0, "load_seconds_later": 0}


def measure() -> Iterator[Figure]:
    """Bring the lab up and take every figure there."""
    # As an installer does: a node cannot write beside our source, and would compile it for every command.
    compileall.compile_dir(SOURCE / "sparkserve", quiet=1)
    with paired() as pair:
        pair.reset()
        pair.script_engine(**INSTANT)
        _succeed(pair, "up")
        yield _connections(pair)
        yield Figure("status_seconds", _median(lambda: _timed(pair, "status")), "s", 1.0)
        yield Figure("second_start_seconds", _median(lambda: _timed(pair, "start")), "s", 1.5)
        yield from _engine_killed(pair)
        yield _start_over_docker(pair)
        yield _rank_killed_while_loading(pair)
        yield from _worker_gone(pair)
        yield from _named_by_watch(pair)
        yield _lost_by_watching(pair)
        yield _beside_sparkrun(pair)


def _succeed(pair: Pair, *words: str) -> dict[str, object]:
    answer = pair.ask(*words)
    if answer["exit_code"] != 0:
        raise RuntimeError(f"sparkserve {' '.join(words)}: {answer}")
    return answer


def _timed(pair: Pair, *words: str) -> float:
    begun = time.perf_counter()
    _succeed(pair, *words)
    return time.perf_counter() - begun


def _median(measured: Callable[[], float]) -> float:
    return statistics.median(measured() for _ in range(RUNS))


def _connections(pair: Pair) -> Figure:
    """Count the logins of what only looks, of a start, and of a stop; the pair is left as it was found."""

    def of(command: str) -> int:
        before = len(pair.logins())
        _succeed(pair, command)
        return len(pair.logins()) - before

    return connections("control_connections", map(of, ("status", "diagnose", "stop", "start")))


def _start_over_docker(pair: Pair) -> Figure:
    """Compare `start` with two bare `docker run`s of the very same containers, by turns."""
    _succeed(pair, "start")
    argvs = {node.name: _recreate(node, rank) for rank, node in enumerate(pair.lab.nodes)}
    _succeed(pair, "stop")
    differences = []
    for _ in range(RUNS):
        ours = _timed(pair, "start")
        _succeed(pair, "stop")
        differences.append(ours - _run_by_hand(pair, argvs))
    return Figure("start_over_docker_run_seconds", statistics.median(differences), "s", 2.0)


def _recreate(node: LabNode, rank: int) -> list[str]:
    """Write the `docker run` that makes a container as the running one is."""
    found = json.loads(node.docker("inspect", f"sparkserve-rank{rank}"))[0]
    config, host = found["Config"], found["HostConfig"]
    argv = ["run", "-d", "--init", "--network", "host", "--gpus", "all", "--name", f"by-hand-rank{rank}"]
    argv += ["--security-opt", "no-new-privileges", "--ipc", host["IpcMode"], "--cap-add", "IPC_LOCK"]
    argv += [word for item in config["Env"] for word in ("--env", item)]
    for mount in host["Mounts"] or []:
        only = ",readonly" if mount.get("ReadOnly") else ""
        argv += ["--mount", f"type=bind,source={mount['Source']},target={mount['Target']}{only}"]
    argv += [word for bind in host["Binds"] or [] for word in ("--volume", bind)]
    argv += [word for item in host["Devices"] or [] for word in ("--device", item["PathOnHost"])]
    return [*argv, "--entrypoint", config["Entrypoint"][0], config["Image"], *config["Entrypoint"][1:], *config["Cmd"]]


def _run_by_hand(pair: Pair, argvs: dict[str, list[str]]) -> float:
    """Run both containers as a script would, until the API answers a completion; then remove them."""
    begun = time.perf_counter()
    threads = [threading.Thread(target=node.docker, args=argvs[node.name]) for node in reversed(pair.lab.nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    body = json.dumps({"model": OURS.model, "prompt": "1", "max_tokens": 1})
    ask = f"curl -sf -m 5 {OURS.url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    pair.head.run(["sh", "-c", f"for i in $(seq 600); do {ask} && exit 0; sleep 0.05; done; exit 1"], timeout=60)
    seconds = time.perf_counter() - begun
    for rank, node in enumerate(pair.lab.nodes):
        node.docker("stop", f"by-hand-rank{rank}")
        node.docker("rm", f"by-hand-rank{rank}")
    return seconds


def _rank_killed_while_loading(pair: Pair) -> Figure:
    def one(rank: int) -> float:
        pair.reset()
        pair.script_engine(load_seconds_first=60, load_seconds_later=60)
        with pair.head.popen(pair.command("start"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as start:
            _wait(lambda: bool(pair.head.docker("ps", "-q", "--filter", "name=sparkserve-rank0")))
            time.sleep(1.0)
            pair.lab.nodes[rank].docker("kill", f"sparkserve-rank{rank}")
            begun = time.perf_counter()
            code = start.wait(timeout=60)
            seconds = time.perf_counter() - begun
        left = [node.docker("ps", "-aq") for node in pair.lab.nodes]
        if code == 0 or any(left):
            raise RuntimeError(f"start ended with {code} and left {left}")
        return seconds

    worst = max(one(rank) for rank in (1, 0, 1))
    pair.reset()
    pair.script_engine(**INSTANT)
    return Figure("rank_killed_in_load_seconds", worst, "s", 5.0)


def _engine_killed(pair: Pair) -> Iterator[Figure]:
    """Kill the engine's process inside rank 1's container: the very next look must say degraded."""
    _signal_engine(pair, 1, "KILL")
    looks = 0
    while looks < 5:
        looks += 1
        if pair.ask("status")["exit_code"] == 5:
            break
    yield Figure("looks_until_degraded", looks, "looks", 1)
    _succeed(pair, "start")


def _signal_engine(pair: Pair, rank: int, signal_name: str) -> None:
    """Send a signal to the engine's process inside a rank's container."""
    node = pair.lab.nodes[rank]
    top = node.docker("top", f"sparkserve-rank{rank}", "-eo", "pid,args").splitlines()
    engine = next(line.split()[0] for line in top if "tensorfold_lab" in line and "docker-init" not in line)
    node.run(["kill", f"-{signal_name}", engine], user="root")


def _worker_gone(pair: Pair) -> Iterator[Figure]:
    """Lose the worker in three ways: its sshd stands still, its interfaces are down, its packets are dropped."""
    seconds = []
    for lost in (_frozen, _unplugged, _dropping):
        with lost(pair.worker):
            begun = time.perf_counter()
            code = pair.ask("status")["exit_code"]
            seconds.append(time.perf_counter() - begun)
        if code != 6:
            raise RuntimeError(f"status of a pair with a lost worker ended with {code}")
    yield Figure("status_worker_gone_seconds", max(seconds), "s", 6.0)


@contextmanager
def _frozen(node: LabNode) -> Iterator[None]:
    node.pause_sshd()
    try:
        yield
    finally:
        node.resume_sshd()


@contextmanager
def _unplugged(node: LabNode) -> Iterator[None]:
    interfaces = (node.management_interface, node.link_interface)
    for interface in interfaces:
        node.run(["ip", "link", "set", interface, "down"], user="root")
    try:
        yield
    finally:
        for interface in interfaces:
            node.run(["ip", "link", "set", interface, "up"], user="root")


@contextmanager
def _dropping(node: LabNode) -> Iterator[None]:
    rule = ["INPUT", "!", "-i", "lo", "-j", "DROP"]
    node.run(["iptables", "-A", *rule], user="root")
    try:
        yield
    finally:
        node.run(["iptables", "-D", *rule], user="root")


def _named_by_watch(pair: Pair) -> Iterator[Figure]:
    """Break the ranks of a serving pair by turns, in each way; the watch must name them, and brings the pair back."""
    ways: dict[str, Callable[[int], object]] = {
        "killed_rank": lambda rank: pair.lab.nodes[rank].docker("kill", f"sparkserve-rank{rank}"),
        "killed_engine": lambda rank: _signal_engine(pair, rank, "KILL"),
        "stopped_rank": lambda rank: _signal_engine(pair, rank, "STOP"),
    }
    for name, break_rank in ways.items():
        worst = max(_seconds_until_named(pair, rank, break_rank) for rank in (1, 0, 1))
        yield Figure(f"watch_names_{name}_seconds", worst, "s", 3.0)


def _seconds_until_named(pair: Pair, rank: int, break_rank: Callable[[int], object]) -> float:
    pair.reset()
    pair.script_engine(**INSTANT)
    _succeed(pair, "start")
    with watching(pair) as watch:
        watch.wait_for("running")
        time.sleep(1.0)
        broken = time.time()
        break_rank(rank)
        named: float = watch.named(rank, broken)["at"]
        watch.wait_for("restarted", 60)
    return named - broken


def _lost_by_watching(pair: Pair) -> Figure:
    """Compare a stream with and without anyone looking."""
    pair.reset()
    pair.script_engine(**INSTANT, decode_tokens_per_second=TOKENS_PER_SECOND)
    _succeed(pair, "start")

    @contextmanager
    def looking() -> Iterator[None]:
        argv = pair.command("status", "--watch")
        with watching(pair) as watch, pair.head.popen(argv, stdout=subprocess.DEVNULL) as status:
            watch.wait_for("running")
            yield
            status.send_signal(signal.SIGINT)
            status.wait(20)

    return Figure("tokens_lost_while_watched_percent", percent_lost(pair, looking), "%", 2.0)


def _beside_sparkrun(pair: Pair) -> Figure:
    """Compare with sparkrun 0.4.2 where it and a Python for it can be had: everything in place, a trivial server."""
    name, limit = "start_over_sparkrun_ratio", 0.2
    missing = peer.install()
    if missing:
        return Figure(name, None, "x", limit, note=missing)
    pair.reset()
    peer.prepare(pair)
    pairs = [(peer.time_ours(pair), peer.time_theirs(pair)) for _ in range(RUNS)]
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return Figure(name, ratio, "x", limit, note=f"{ours:.1f} s, theirs {theirs:.1f} s")


def _wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.1)
