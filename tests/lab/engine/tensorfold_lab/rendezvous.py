"""The two ranks find each other over TCP and refuse to go on with different settings."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .arguments import Settings
from .lifetime import Deadline, EngineError, Lifetime
from .log import log
from .wire import PeerLostError, Wire

GREETING_SECONDS = 5.0


@dataclass(frozen=True)
class Links:
    """The connections that stay: `steps` carries the work, `beats` the heartbeat."""

    steps: Wire
    beats: Wire


class Rendezvous:
    """One rank's side of the meeting at master:master-port."""

    def __init__(self, settings: Settings, fingerprint: str, lifetime: Lifetime, deadline: Deadline) -> None:
        self._settings = settings
        self._hello: dict[str, Any] = {"shared": settings.shared, "model": fingerprint, "rank": settings.rank}
        self._lifetime = lifetime
        self._deadline = deadline

    def meet(self) -> Links:
        """Wait for the other rank, compare settings, and open the connections that stay."""
        check_socket_interface()
        return self._host() if self._settings.rank == 0 else self._join()

    def _host(self) -> Links:
        # Stays open, as the real store does: a newer worker that comes to an older head is kept waiting.
        store_listener = _listen(self._settings.master, self._settings.master_port)
        # The engine binds these two to every address, on ports that the kernel picks.
        with _listen("", 0) as steps, _listen("", 0) as beats:
            self._hello["ports"] = [steps.getsockname()[1], beats.getsockname()[1]]
            while True:
                store = Wire(self._accept(store_listener))
                try:
                    store.send(self._hello)
                    other = store.receive(self._greeting_patience())
                except PeerLostError:
                    store.close()  # a port probe, not a rank
                    continue
                self._compare(other)
                self._store_listener = store_listener
                return Links(Wire(self._accept(steps)), Wire(self._accept(beats)))

    def _join(self) -> Links:
        store = Wire(self._connect(self._settings.master_port))
        try:
            store.send(self._hello)
            other = store.receive(self._check_deadline)
        except PeerLostError as problem:
            raise EngineError(f"RuntimeError: NCCL error 6: rank 0 left the rendezvous: {problem}") from problem
        self._compare(other)
        steps, beats = other["ports"]
        return Links(Wire(self._connect(steps)), Wire(self._connect(beats)))

    def _accept(self, listener: socket.socket) -> socket.socket:
        listener.settimeout(0.2)
        while True:
            self._check_deadline()
            try:
                return listener.accept()[0]
            except TimeoutError:
                continue

    def _connect(self, port: int) -> socket.socket:
        while True:
            self._check_deadline()
            try:
                return socket.create_connection((self._settings.master, port), timeout=GREETING_SECONDS)
            except OSError:
                self._lifetime.pause(0.1)

    def _greeting_patience(self) -> Callable[[], None]:
        patience = Deadline(min(GREETING_SECONDS, self._deadline.left))

        def check() -> None:
            self._lifetime.pause(0)
            if patience.left == 0:
                raise PeerLostError("connected and said nothing")

        return check

    def _check_deadline(self) -> None:
        self._lifetime.pause(0)
        if self._deadline.left:
            return
        seconds, place = f"{self._deadline.seconds:g}", f"{self._settings.master}:{self._settings.master_port}"
        if self._settings.rank == 0:
            raise EngineError(f"torch.distributed.DistStoreError: timed out after {seconds} s, 1/2 clients joined")
        raise EngineError(f"RuntimeError: NCCL error 6: rank 0 not reached at {place} within {seconds} s")

    def _compare(self, other: dict[str, Any]) -> None:
        mine, theirs = self._hello["shared"], other.get("shared", {})
        if self._hello["rank"] == other.get("rank"):
            raise EngineError(f"ValueError: both sides are rank {self._settings.rank}")
        differ = [flag for flag in mine if mine[flag] != theirs.get(flag)]
        if not differ and self._hello["model"] == other.get("model"):
            return
        if {"--vision", "--parallel"} & set(differ):
            rule = "--vision and --parallel must be the same on every rank"
        else:
            rule = f"{' and '.join(differ) or 'the model files'} must be the same on every rank"
        values = "; ".join(f"{flag} is {mine[flag]} here and {theirs.get(flag)} there" for flag in differ)
        raise EngineError(f"ValueError: {rule}{f' ({values})' if values else ''}")


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as problem:
        raise EngineError(f"torch.distributed.DistNetworkError: {host}:{port}: {problem.strerror}") from problem


def check_socket_interface() -> None:
    """Refuse to start when NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names no interface of this node."""
    present = [name for _, name in socket.if_nameindex()]
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "")
        prefixes = [prefix for prefix in wanted.lstrip("=").split(",") if prefix]
        if wanted.startswith("^") or not prefixes:
            continue
        if not any(name.startswith(prefix) for name in present for prefix in prefixes):
            log(f"NCCL WARN Bootstrap : no socket interface found for {variable}={wanted}")
            raise EngineError(f"RuntimeError: NCCL error 3: no interface {wanted} among {', '.join(present)}")
