"""One end of the link proof: it listens on the cable, dials the other end, and counts what arrives.

Standard library only, Python 3.9 or newer: it is sent to a node with the node program, and asked as that is. It ends
with its standard input, or after a minute, and nothing that it opened or started outlives it. What it sends is a buffer
of its own memory, and what arrives is thrown away unread: no disk and no page cache takes part.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
import threading
import time
from typing import Any

from sparkserve.node_program import ACTIONS, children, main, run

Request = dict[str, Any]
LIFETIME = 60
CONNECT_SECONDS = 1.0
SETTLE_SECONDS = 0.3
BLOCK = 1 << 20
# Not in Python's socket module: IP_MTU_DISCOVER and IP_PMTUDISC_PROBE, which sets "do not fragment" and, unlike
# IP_PMTUDISC_DO, is not told by an earlier answer what the path takes.
MTU_DISCOVER, MTU_PROBE = 10, 3
# Close with a reset: neither end then keeps a port in TIME_WAIT, where an engine would find it taken.
AT_ONCE = struct.pack("ii", 1, 0)


class Arrivals:
    """What has arrived: sizes of datagrams, and bytes of streams with the moments of the first and the last."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.datagrams: set[int] = set()
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.size = self.open = 0
        self.first = self.last = 0.0

    def wait(self, is_done: Any) -> None:  # noqa: ANN401 - a question without arguments
        """Wait a moment for something to become true; the lock must be held."""
        self.changed.wait_for(is_done, SETTLE_SECONDS)


arrived = Arrivals()


def listen(request: Request) -> dict[str, Any]:
    """Listen on free ports of the address, and on the one that an engine would take; tell which they are."""
    address = request["address"]
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((address, 0))
    threading.Thread(target=take_datagrams, args=(datagrams,), daemon=True).start()
    free = serve(address, 0)
    try:
        serve(address, request["port"])
        held = ""
    except OSError as error:
        held = error.strerror or str(error)
    return {"udp": datagrams.getsockname()[1], "tcp": free, "held": held}


def serve(address: str, port: int) -> int:
    """Listen on a TCP port; every connection is read to its end."""
    server = socket.create_server((address, port), backlog=64)
    threading.Thread(target=take_streams, args=(server,), daemon=True).start()
    return int(server.getsockname()[1])


def take_datagrams(server: socket.socket) -> None:
    """Note the size of every datagram."""
    while True:
        size = len(server.recv(1 << 16))
        with arrived.changed:
            arrived.datagrams.add(size)
            arrived.changed.notify_all()


def take_streams(server: socket.socket) -> None:
    """Take every connection."""
    while True:
        stream, _ = server.accept()
        with arrived.changed:
            arrived.open += 1
        threading.Thread(target=take_stream, args=(stream,), daemon=True).start()


def take_stream(stream: socket.socket) -> None:
    """Count what a connection brings until it ends; the kernel throws it away without a copy."""
    buffer = bytearray(BLOCK)
    with stream, contextlib.suppress(OSError):
        while count := stream.recv_into(buffer, BLOCK, socket.MSG_TRUNC):
            with arrived.changed:
                arrived.last = time.monotonic()
                arrived.first = arrived.first or arrived.last
                arrived.size += count
    with arrived.changed:
        arrived.open -= 1
        arrived.changed.notify_all()


def send_datagrams(request: Request) -> dict[str, Any]:
    """Send datagrams that must not be fragmented, each size three times; answers what the kernel said of each."""
    problems = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.bind((request["address"], 0))
        sender.setsockopt(socket.IPPROTO_IP, MTU_DISCOVER, MTU_PROBE)
        for size in request["sizes"] * 3:
            try:
                sender.sendto(bytes(size), tuple(request["to"]))
            except OSError as error:
                problems[str(size)] = "too long for this end" if error.errno == errno.EMSGSIZE else str(error.strerror)
    return problems


def datagrams(request: Request) -> dict[str, Any]:
    """Tell which of the sizes have arrived."""
    wanted = set(request["sizes"])
    with arrived.changed:
        arrived.wait(lambda: wanted <= arrived.datagrams)
        return {"sizes": sorted(wanted & arrived.datagrams)}


def dial(address: str, to: tuple[str, int]) -> socket.socket:
    """Open a connection from our address on the cable."""
    stream = socket.create_connection(to, CONNECT_SECONDS, (address, 0))
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    return stream


def connect(request: Request) -> dict[str, str]:
    """Try to connect to each port of the other end, side by side; answers what went wrong, or nothing."""
    answers = {}

    def one(port: int) -> None:
        try:
            dial(request["address"], (request["to"], port)).close()
            answers[str(port)] = ""
        except OSError as error:
            late = isinstance(error, TimeoutError)
            answers[str(port)] = "no answer" if late else str(error.strerror or error)

    run_all([threading.Thread(target=one, args=(port,)) for port in request["ports"]])
    return answers


def run_all(threads: list[threading.Thread]) -> None:
    """Run threads to their end."""
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def send(request: Request) -> dict[str, Any]:
    """Send up to so many bytes, for up to so many seconds, over several streams."""
    streams = [dial(request["address"], tuple(request["to"])) for _ in range(request["streams"])]
    share = request["bytes"] // len(streams)
    until = time.monotonic() + request["seconds"]

    def one(stream: socket.socket) -> None:
        block, left = memoryview(bytes(BLOCK)), share
        with stream, contextlib.suppress(OSError):
            while left > 0 and (patience := until - time.monotonic()) > 0:
                stream.settimeout(patience)
                left -= stream.send(block[: min(left, BLOCK)])

    run_all([threading.Thread(target=one, args=(stream,)) for stream in streams])
    return {}


def received(_request: Request) -> dict[str, Any]:
    """Tell how many bytes arrived in how many seconds, and begin to count anew."""
    with arrived.changed:
        arrived.wait(lambda: not arrived.open)
        answer = {"bytes": arrived.size, "seconds": arrived.last - arrived.first}
        arrived.forget()
    return answer


def end(*_: object) -> None:
    """End at once, with all that we started."""
    for child in list(children):
        with contextlib.suppress(OSError):
            child.kill()
    os._exit(0)


if __name__ == "__main__":
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, end)
    signal.alarm(LIFETIME)
    own = (listen, send_datagrams, datagrams, connect, send, received)
    ACTIONS.update({action.__name__: action for action in own})
    ACTIONS["run"] = lambda request: run(request["argv"], request["seconds"])
    main()
    end()
