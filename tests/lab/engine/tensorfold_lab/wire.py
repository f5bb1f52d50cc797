"""JSON lines over a TCP connection between the ranks."""

import json
import socket
import threading
from collections.abc import Callable
from typing import Any

POLL_SECONDS = 0.2
LONGEST_MESSAGE = 1 << 16


class PeerLostError(ConnectionError):
    """The other rank is gone or silent."""


class Wire:
    """One connection; one thread reads, any thread sends."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(POLL_SECONDS)
        self._buffer = b""
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        try:
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError as problem:
            raise PeerLostError(f"cannot send: {problem}") from problem

    def receive(self, still_waiting: Callable[[], object]) -> dict[str, Any]:
        """Wait for one message; `still_waiting` is called now and then, and may raise to end the wait."""
        while b"\n" not in self._buffer:
            still_waiting()
            try:
                piece = self._socket.recv(65_536)
            except TimeoutError:
                continue
            except OSError as problem:
                raise PeerLostError(f"cannot receive: {problem}") from problem
            if not piece or len(self._buffer) > LONGEST_MESSAGE:
                raise PeerLostError("connection closed by the other side")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return _message(line)

    def close(self) -> None:
        """Close the connection; whoever waits on it leaves with PeerLostError."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other side was first
        finally:
            self._socket.close()


def _message(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError as problem:
        raise PeerLostError("does not speak this protocol") from problem
    if not isinstance(message, dict):
        raise PeerLostError("does not speak this protocol")
    return message
