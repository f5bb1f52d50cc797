"""The two nodes of a pair: connecting, asking both, collecting both failures, and the one lock of a pair."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from sparkserve import docker_program, node_program, search_program
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_NOT_READY, Failures, SparkserveError, node_error, usage_error
from sparkserve.hosts import Host, LocalHost, Process, UnreachableHost, connection_lost, expand_home
from sparkserve.lock import Lock
from sparkserve.manifest import Manifest, ManifestFile
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings
from sparkserve.ssh_host import SshHost

if TYPE_CHECKING:
    import docker

log = logging.getLogger("sparkserve.cluster")

Role = Literal["head", "worker"]
ROLES: tuple[Role, Role] = ("head", "worker")
Result = TypeVar("Result")
# The exit code with which every shell says that there is no such command.
_NOT_FOUND = 127
_OVERLOADED = "the machine may be out of memory: wait a minute, then look again"
# The node reads exactly the bytes of each part from stdin; what follows on the same stream are requests.
_BOOTSTRAP = (
    "import sys, types; [exec(compile(sys.stdin.buffer.read(size), name, 'exec'), "
    "sys.modules.setdefault(name, types.ModuleType(name)).__dict__) for name, size in {sizes}]"
)
_PARTS = (docker_program.__file__, search_program.__file__, node_program.__file__)


class NodeSession:
    """The node program, or another on top of it, running on a node; many threads may ask at once."""

    def __init__(self, host: Host, *more: str) -> None:
        *modules, program = [(Path(source).stem, Path(source).read_bytes()) for source in (*_PARTS, *more)]
        named = [("sparkserve", b""), *((f"sparkserve.{name}", text) for name, text in modules)]
        parts = [*named, ("__main__", program[1])]
        sizes = [(name, len(text)) for name, text in parts]
        self._host = host
        self._process: Process = host.open([host.python, "-I", "-c", _BOOTSTRAP.format(sizes=sizes)])
        self._lock = threading.Lock()
        self._next = 0
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._ended = False
        self.on_answer: Callable[[str, Any], None] = lambda _do, _result: None
        try:
            self._send(b"".join(text for _, text in parts))
        except SparkserveError:
            self._process.close()
            raise
        threading.Thread(target=self._listen, name=f"node program of {host.name}", daemon=True).start()

    def _send(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except (OSError, ValueError) as error:  # lost, or closed by us
            raise self._end_error() from error

    def _listen(self) -> None:
        try:
            for line in self._process.stdout:
                if line.startswith(b'{"id":'):
                    message = json.loads(line)
                    self._answers[message["id"]].put(message)
                else:  # a shell that greets on every login must not end the session
                    log.debug("%s: not ours: %r", self._host.name, line)
        except (OSError, ValueError):
            log.debug("%s: the node program's answers end in the middle", self._host.name)
        finally:
            with self._lock:
                self._ended = True
                for answers in self._answers.values():
                    answers.put(None)

    def ask(
        self,
        do: str,
        *,
        timeout: float = 60.0,
        on_progress: Callable[[dict[str, Any]], None] | None = None,
        **fields: Any,  # noqa: ANN401 - the fields of a JSON request
    ) -> Any:  # noqa: ANN401 - the JSON answer
        """Send one request and wait for its result; `timeout` seconds without any line of answer end the wait."""
        answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with self._lock:
            if self._ended:
                raise self._end_error()
            self._next += 1
            number = self._next
            self._answers[number] = answers
            self._send(json.dumps({"id": number, "do": do, **fields}).encode() + b"\n")
        while True:
            try:
                message = answers.get(timeout=timeout)
            except queue.Empty as error:
                text = f"the node program gave no answer to `{do}` within {timeout:g} s"
                node, code = self._host.name, EXIT_COULD_NOT_LOOK
                raise SparkserveError("node_silent", text, _OVERLOADED, node, exit_code=code) from error
            if message is None:
                raise self._end_error()
            if "progress" not in message:
                break
            if on_progress:
                on_progress(message["progress"])
        self._answers.pop(number)
        if "error" in message:
            raise node_error(self._host.name, do, message["error"])
        self.on_answer(do, message["result"])
        return message["result"]

    def _end_error(self) -> SparkserveError:
        details = self._process.error_text().strip()
        try:
            code = self._process.wait(2)
        except (TimeoutError, SparkserveError):
            return connection_lost(self._host.name, details)
        if code == _NOT_FOUND:
            hint = "sudo apt-get install python3"
            message = "python3 is not there, or not on PATH for SSH sessions"
            return SparkserveError("python_missing", message, hint, self._host.name, details, EXIT_NOT_READY)
        message = f"the node program ended with exit code {code}"
        return SparkserveError("node_ended", message, _OVERLOADED, self._host.name, details, EXIT_COULD_NOT_LOOK)

    def close(self) -> None:
        """End the program; it also ends by itself with the connection."""
        self._process.close()


class _Once(Generic[Result]):
    """A cached property that two threads never make twice, and that no other node waits for."""

    def __init__(self, make: Callable[[Any], Result]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, node: Node, owner: type | None = None) -> Result:
        with node.opening:
            if self._name not in node.__dict__:
                node.__dict__[self._name] = self._make(node)
            found: Result = node.__dict__[self._name]
            return found


@dataclass
class Node:
    """One machine of the pair, connected."""

    role: Role
    host: Host
    settings: Settings = field(repr=False)
    opening: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    @property
    def rank(self) -> int:
        """Rank 0 is the head, rank 1 the worker."""
        return ROLES.index(self.role)

    @_Once
    def session(self) -> NodeSession:
        """Start the node program, once per command."""
        return NodeSession(self.host)

    @_Once
    def identity(self) -> dict[str, Any]:
        """Home, user, hostname and number of CPUs of the node's account."""
        found: dict[str, Any] = self.session.ask("hello", timeout=20)
        return found

    @property
    def link_address(self) -> str:
        """The node's own address on the cable, as the settings name it."""
        return self.settings.head_link if self.role == "head" else self.settings.worker_link

    @property
    def models_dir(self) -> str:
        """Absolute models directory of this node."""
        own = self.settings.worker_models_dir if self.role == "worker" else None
        return expand_home(own or self.settings.models_dir, self.identity["home"])

    @property
    def cache_dir(self) -> str:
        """Absolute cache directory of this node."""
        own = self.settings.worker_cache_dir if self.role == "worker" else None
        return expand_home(own or self.settings.cache_dir, self.identity["home"])

    @property
    def proofs_file(self) -> str:
        """Where this node remembers hashes of unchanged files."""
        return f"{self.models_dir}/.sparkserve/proofs.json"

    @_Once
    def adopted(self) -> dict[str, str]:
        """Files of others that this node uses in place: `<org>/<name>/<commit>/<path>` to absolute path."""
        path = f"{self.models_dir}/.sparkserve/adopted.json"
        text = self.session.ask("facts", files=[path])["files"][path]
        found: dict[str, str] = json.loads(text) if text else {}
        return found

    def place(self, manifest: Manifest, file: ManifestFile) -> str:
        """Absolute path of a weights file on this node: adopted, or below our models directory."""
        name = f"{manifest.directory}/{file.path}"
        return self.adopted.get(name) or f"{self.models_dir}/{name}"

    @_Once
    def docker(self) -> docker.DockerClient:
        """Open the node's Docker engine, over its socket or over the one SSH connection."""
        from sparkserve.docker_client import local_client, remote_client

        if isinstance(self.host, UnreachableHost):
            raise self.host.error
        if isinstance(self.host, SshHost):
            return remote_client(self.host)
        return local_client(self.role)

    def close(self) -> None:
        """End everything that was opened."""
        for name in ("session", "docker"):
            if name in self.__dict__:
                self.__dict__[name].close()
        self.host.close()


@dataclass
class Cluster:
    """The pair."""

    head: Node
    worker: Node

    @property
    def nodes(self) -> tuple[Node, Node]:
        """Both nodes, by rank."""
        return self.head, self.worker

    def node(self, role: str) -> Node:
        """Find a node by its role."""
        return self.head if role == "head" else self.worker

    def on_both(self, action: Callable[[Node], Result]) -> dict[Role, Result]:
        """Run `action` on both nodes side by side; when any fails, wait for both and raise all failures."""
        results, errors = self.try_both(action)
        if errors:
            raise Failures(list(errors.values()))
        return results

    def try_both(self, action: Callable[[Node], Result]) -> tuple[dict[Role, Result], dict[Role, SparkserveError]]:
        """Run `action` on both nodes side by side and give results and failures by role."""
        results: dict[Role, Result] = {}
        errors: dict[Role, SparkserveError] = {}
        bugs: list[BaseException] = []

        def one(node: Node) -> None:
            try:
                results[node.role] = action(node)
            except SparkserveError as error:
                error.node = error.node or node.role
                errors[node.role] = error
            except BaseException as error:  # noqa: BLE001 - a bug of ours: raised again below, in the caller's thread
                bugs.append(error)

        threads = [threading.Thread(target=one, args=(node,), daemon=True) for node in self.nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.5)  # short joins leave room for Ctrl-C
        if bugs:
            raise bugs[0]
        # By rank, not by who was first: what is told of two nodes is told in the same order every time.
        answered = {role: results[role] for role in ROLES if role in results}
        return answered, {role: errors[role] for role in ROLES if role in errors}


@dataclass(frozen=True)
class Deployment:
    """All that decides what the pair should be: what the owner set, what to serve, what that resolved to, and where.

    `build_options` (`--no-cache`, `--pull`) are asked for by hand, and ask for a build whatever is there.
    """

    settings: Settings
    recipe: Recipe
    lock: Lock
    cluster: Cluster
    build_options: tuple[str, ...] = ()


@contextlib.contextmanager
def connect(settings: Settings, *, lenient: bool = False) -> Iterator[Cluster]:
    """Open both nodes for one command and close them after it.

    A `lenient` caller (status, stop) gets the pair also when the worker cannot be reached; asking it then tells why.
    """
    require_worker(settings)
    head = Node("head", LocalHost("head"), settings)
    try:
        worker = Node("worker", _worker_host(settings, lenient=lenient), settings)
    except BaseException:
        head.close()
        raise
    try:
        yield Cluster(head, worker)
    finally:
        worker.close()
        head.close()


def require_worker(settings: Settings) -> None:
    """Refuse settings that name no second machine, before anything is looked up for them."""
    if not settings.worker:
        raise usage_error("worker_unset", "SPARKSERVE_WORKER is not set", "sparkserve init")


def _worker_host(settings: Settings, *, lenient: bool) -> Host:
    from sparkserve import ssh

    try:
        return ssh.connect(settings)
    except SparkserveError as error:
        if lenient and error.exit_code == EXIT_COULD_NOT_LOOK:
            return UnreachableHost("worker", error)
        raise


@contextlib.contextmanager
def pair_lock(directory: Path, command: str, wait_seconds: float = 0.3) -> Iterator[None]:
    """Hold the one lock of this head while something is written; say who holds it otherwise.

    Whoever only asks who holds it has it for an instant: that is waited for.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / "lock"
    deadline = time.monotonic() + wait_seconds
    with path.open("a+b", buffering=0) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.2)
                    continue
                message = f"another command holds the lock of this pair: {lock_holder(directory) or 'another run'}"
                raise SparkserveError(
                    "locked", message, "wait for it to end, or stop it", "head", exit_code=EXIT_NOT_READY
                ) from error
        file.seek(0)
        file.truncate()
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, only without a name
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"`sparkserve {command}`, process {os.getpid()}, since {now}\n".encode())
        yield
        file.seek(0)
        file.truncate()


def lock_holder(directory: Path) -> str:
    """Say which command writes to the pair right now; empty where none does."""
    with contextlib.suppress(OSError), (directory / "lock").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().decode(errors="replace").strip() or "another run"
    return ""
