"""Weights on the two-node lab: fetched, copied, proved, adopted, killed; each beside what the usual tools take."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.bench.figures import Figure
from tests.bench.weights_lab import BIN, HOME, Bench, FileSet, bench_lab
from tests.lab.node import LabNode

Action = Callable[[], object]
MIB = 1 << 20
RUNS = int(os.environ.get("BENCH_RUNS", "5"))
TRIALS = int(os.environ.get("BENCH_TRIALS", "20"))
LINE_RATE = 60_000_000
LINE_SIZES = [512 * MIB] * 2 + [64 * MIB] * 16
LARGE_SIZES = [512 * MIB] * 4 + [64 * MIB] * 32
KILL_SIZES = [128 * MIB] * 2 + [32 * MIB] * 4
KILL_RATE = 150_000_000


def measure() -> Iterator[Figure]:
    """Bring the lab up and take every figure there."""
    with bench_lab() as bench:
        large = bench.make_set("large", LARGE_SIZES)
        yield from _adopted(bench, large)
        yield from _hashed(bench, large)
        yield _copied(bench, large)
        for node in bench.lab.nodes:
            node.run(["rm", "-rf", large.models, f"{HOME}/theirs"], timeout=300)
        line = bench.make_set("line", LINE_SIZES)
        yield _downloaded(bench, line)
        yield from _whole_line(bench, line)
        yield _verified_again(bench)
        yield _killed(bench)
        yield Figure("launcher_peak_mib", max(bench.peak_kib) / 1024, "MiB", 200)


def _remove(bench: Bench, *directories: str) -> None:
    for node in bench.lab.nodes:
        node.run(["rm", "-rf", *directories], timeout=300)


def _run(node: LabNode, *argv: str, **options: Any) -> bytes:
    return node.run(argv, timeout=600, **options).stdout


def _adopted(bench: Bench, large: FileSet) -> Iterator[Figure]:
    """Count the bytes below our models directories after 4 GiB were adopted on both nodes; notes of ours apart."""
    for node in bench.lab.nodes:
        bench.fill(node, large, f"{HOME}/theirs")
    begun = time.perf_counter()
    answer = bench.sparkserve(large, "download", "--adopt", f"{HOME}/theirs")
    seconds = time.perf_counter() - begun
    adopted = [row["key"] for row in answer["data"]["applied"] if "/adopt/" in row["key"]]
    if len(adopted) != 2 * len(LARGE_SIZES):
        raise RuntimeError(f"{len(adopted)} files were adopted")
    count = ["find", large.models, "-path", "*/.sparkserve", "-prune", "-o", "-type", "f", "-printf", "%s\\n"]
    written = sum(int(size) for node in bench.lab.nodes for size in _run(node, *count).split())
    yield Figure("adopt_bytes_written", written, "bytes", 0, note=f"8 GiB proved in {seconds:.1f} s")


def _hashed(bench: Bench, large: FileSet) -> Iterator[Figure]:
    """Hash 4 GiB on one node, by `weights verify --full` while the worker has none, and by openssl."""
    head, worker, place = bench.lab.head, bench.lab.worker, f"{HOME}/theirs"
    paths = [f"{place}/{entry.path}" for entry in large.entries]
    worker.run(["mv", place, f"{place}.away"])

    def ours() -> None:
        found = bench.sparkserve(large, "weights", "verify", "--full", code=1)["data"]
        if found["hashed"] != large.size or any(row["node"] == "head" for row in found["findings"]):
            raise RuntimeError(f"verify: {found}")

    def theirs() -> None:
        _run(head, "openssl", "dgst", "-sha256", *paths)

    yield _ratio("verify_over_openssl", 0.7, _pairs(lambda: bench.warm(head, place), ours, theirs))
    bench.warm(head, place)
    ours()
    kept = sum(int(row) for row in _run(head, "fincore", "--bytes", "--noheadings", "--output", "RES", *paths).split())
    yield Figure("cached_after_hash_percent", 100 * kept / large.size, "%", 5)
    worker.run(["mv", f"{place}.away", place])


def _pairs(prepare: Callable[[], object], ours: Action, theirs: Action) -> list[tuple[float, float]]:
    """Time two actions by turns; what prepares them is outside of the time."""
    results = []
    for number in range(RUNS):
        times = {}
        for action in (ours, theirs) if number % 2 else (theirs, ours):
            prepare()
            begun = time.perf_counter()
            action()
            times[action] = time.perf_counter() - begun
        results.append((times[ours], times[theirs]))
    return results


def _ratio(name: str, limit: float, pairs: list[tuple[float, float]]) -> Figure:
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return Figure(name, ratio, "times", limit, note=f"{ours:.1f} s, theirs {theirs:.1f} s")


def _copied(bench: Bench, large: FileSet) -> Figure:
    """Bring 4 GiB to the worker: `sparkserve sync`, proof included, and rsync without one."""
    head, worker = bench.lab.head, bench.lab.worker
    head.run(["mkdir", "-p", large.files])
    head.run(["sh", "-c", f"mv {HOME}/theirs/* {large.files}; rm -rf {large.models}/.sparkserve"])
    worker.run(["rm", "-rf", large.models, f"{HOME}/theirs"], timeout=300)
    bench.sparkserve(large, "download")
    target = f"spark@{worker.link_address}:{HOME}/script/"
    head.run(["sh", "-c", f"ssh -o StrictHostKeyChecking=accept-new {worker.link_address} mkdir -p {HOME}/script"])

    def prepare() -> None:
        _run(worker, "sh", "-c", f"rm -rf {large.models} {HOME}/script/*; sync")
        bench.warm(head, large.files)

    def ours() -> None:
        bench.sparkserve(large, "sync")

    def theirs() -> None:
        _run(head, "rsync", "-a", f"{large.files}/", target)

    pairs = _pairs(prepare, ours, theirs)
    prepare()
    return _ratio("copy_over_rsync", 0.7, pairs)


def _hf_download(bench: Bench, files: FileSet, place: str) -> None:
    environment = ["env", f"HF_ENDPOINT={bench.endpoint}", "HF_HUB_DISABLE_TELEMETRY=1", f"HF_HOME={HOME}/script/home"]
    _run(bench.lab.head, *environment, str(BIN / "hf"), "download", files.repo.name, "--local-dir", place)


def _downloaded(bench: Bench, line: FileSet) -> Figure:
    """Fetch 2 GiB as fast as the hub gives, hashing and fsync included, and by `hf download`, which does neither."""
    place = f"{HOME}/script/files"

    def prepare() -> None:
        _remove(bench, line.models, place)
        _run(bench.lab.head, "sync")

    def ours() -> None:
        if bench.measured(*bench.head_only(line)).returncode:
            raise RuntimeError("the download failed")

    pairs = _pairs(prepare, ours, lambda: _hf_download(bench, line, place))
    return _ratio("download_over_hf_download", 0.7, pairs)


def _whole_line(bench: Bench, line: FileSet) -> Iterator[Figure]:
    """Fetch, prove, copy and prove 2 GiB from a hub that gives 60 MB/s, and the same as people script it."""
    head, worker, place = bench.lab.head, bench.lab.worker, f"{HOME}/script/files"
    transfer = line.size / LINE_RATE

    def prepare() -> None:
        _remove(bench, line.models, place)
        worker.run(["mkdir", "-p", place])

    def script() -> None:
        _hf_download(bench, line, place)
        _run(head, "sh", "-c", f"sha256sum {place}/*.bin")
        _run(head, "rsync", "-a", f"{place}/", f"spark@{worker.link_address}:{place}/")
        _run(worker, "sh", "-c", f"sha256sum {place}/*.bin")

    bench.control(rate=LINE_RATE)
    pairs = _pairs(prepare, lambda: bench.sparkserve(line, "download"), script)
    bench.control(rate=None)
    prepare()
    yield Figure("line_over_transfer", statistics.median(ours / transfer for ours, _ in pairs), "times", 1.08)
    yield _ratio("line_over_script", 0.68, pairs)


def _verified_again(bench: Bench) -> Figure:
    many = bench.make_set("many", [MIB] * 45)
    bench.sparkserve(many, "download")
    begun = [time.perf_counter()]
    for _ in range(RUNS):
        if bench.sparkserve(many, "weights", "verify")["data"]["hashed"]:
            raise RuntimeError("unchanged files were read again")
        begun.append(time.perf_counter())
    seconds = statistics.median(after - before for before, after in itertools.pairwise(begun))
    return Figure("second_verify_seconds", seconds, "s", 1.0)


def _killed(bench: Bench) -> Figure:
    """Kill downloads at random moments, let the next one finish, and count what came twice."""
    kill = bench.make_set("kill", KILL_SIZES)
    moments = random.Random(int.from_bytes(os.urandom(2), "big"))
    trials = [_kill_once(bench, kill, moments.uniform(0.9, 2.8)) for _ in range(TRIALS)]
    if twice := [again for again, in_flight in trials if again and not in_flight]:
        raise RuntimeError(f"up to {max(twice)} bytes came twice though nothing was under way")
    met = [again / in_flight for again, in_flight in trials if in_flight]
    if len(met) < 0.75 * TRIALS:
        raise RuntimeError(f"only {len(met)} of {TRIALS} kills met a download under way")
    return Figure("refetched_after_kill_mib_per_segment", max(met) / MIB, "MiB", 32, note=f"{len(met)} kills")


def _kill_once(bench: Bench, kill: FileSet, seconds: float) -> tuple[int, int]:
    """Give the bytes that came twice, and how many requests were under way."""
    _remove(bench, kill.models)
    bench.forget()
    bench.control(rate=KILL_RATE)
    argv = bench.head_only(kill)
    with bench.lab.head.popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    cut_at = time.time()
    before = bench.log()
    in_flight = sum(entry["time"] + entry["seconds"] > cut_at - 0.05 for entry in before)
    bench.control(rate=None)
    _run(bench.lab.head, *argv)
    fetched: int = sum(entry["bytes_sent"] for entry in bench.log())
    return max(0, fetched - kill.size), in_flight
