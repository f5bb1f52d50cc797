"""How fast the hub gives: one GiB to a client that only receives, over one connection and over four."""

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tests.lab.model_repo import BENCH_NAME, make_bench_repo
from tests.lab.repo_store import ModelRepo

GIBIBYTE = 1 << 30


def selfbench(size: int = GIBIBYTE) -> str:
    """Serve from a process of its own, pull `size` bytes in 1 and 4 pieces, and return a line for each."""
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        repo = make_bench_repo(root, [size])
        command = [sys.executable, "-m", "tests.lab.hub", "--repos", scratch, "--hub-name", "", "--content-name", ""]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                endpoint = json.loads(server.stdout.readline())["endpoint"]
                for connections in (1, 4):
                    seconds = _pull(endpoint, repo, size, connections)
                    rate = size / seconds / 1e9
                    lines.append(f"{connections} connection(s): {size} bytes in {seconds:.2f} s = {rate:.2f} GB/s\n")
            finally:
                server.terminate()
    return "".join(lines)


def _pull(endpoint: str, repo: ModelRepo, size: int, connections: int) -> float:
    """Return the seconds that it takes to receive a file in as many ranges at once as there are connections."""
    with urlopen(Request(f"{endpoint}/{BENCH_NAME}/resolve/{repo.head}/file-00001.bin", method="HEAD")) as response:
        link = response.url
    step = size // connections
    received = [0] * connections

    def pull(number: int) -> None:
        received[number] = _receive(link, number * step, step)

    threads = [threading.Thread(target=pull, args=(number,)) for number in range(connections)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began
    if received != [step] * connections:
        raise RuntimeError(f"expected {step} bytes each, received {received}")
    return seconds


def _receive(link: str, start: int, count: int) -> int:
    """Receive a range over a connection of its own and return how many body bytes came."""
    parts = urlsplit(link)
    buffer = bytearray(1 << 20)
    with socket.create_connection((parts.hostname or "", parts.port or 80)) as connection:
        head = f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        connection.sendall(f"{head}Range: bytes={start}-{start + count - 1}\r\n\r\n".encode())
        header = b""
        while b"\r\n\r\n" not in header:
            header += connection.recv(4096)
        if not header.startswith(b"HTTP/1.1 206"):
            raise RuntimeError(header.decode(errors="replace"))
        seen = len(header.partition(b"\r\n\r\n")[2])
        while received := connection.recv_into(buffer):
            seen += received
    return seen
