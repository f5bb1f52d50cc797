"""The lab: two nodes on one machine, brought up and taken down as a whole."""

import fcntl
import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab import registry, scratch
from tests.lab.furnish import Furniture
from tests.lab.holder import Holder
from tests.lab.machine import Process, command, remove_control_groups, termination_raises
from tests.lab.network import Wiring, choose_subnets, remove_uplink
from tests.lab.node import LOGS, LabNode
from tests.lab.state import State

__all__ = ["Lab", "LabNode"]

SOURCE = Path(__file__).parents[2]
STUBS = Path(__file__).parent / "stubs"
HIDDEN_PLACES = (Path("/tmp"), Path("/run"), Path("/dev"))


@dataclass(frozen=True)
class Lab:
    """Two nodes that belong to one checkout; every process that names the same checkout sees the same lab."""

    checkout: Path
    folder: Path
    identity: str
    head: LabNode
    worker: LabNode

    @classmethod
    def for_checkout(cls, checkout: Path) -> "Lab":
        """Name the lab of a checkout; nothing is started."""
        checkout = checkout.resolve()
        digest = hashlib.sha256(str(checkout).encode()).hexdigest()
        identity, folder = digest[:6], checkout / ".lab"
        hostnames = {"head": f"spark-{digest[8:12]}", "worker": f"spark-{int(digest[8:12], 16) ^ 0x5A5A:04x}"}
        nodes = [LabNode(name, host, folder, f"sparkserve-lab-{identity}-{name}") for name, host in hostnames.items()]
        return cls(checkout, folder, identity, *nodes)

    @property
    def nodes(self) -> tuple[LabNode, LabNode]:
        """Head and worker."""
        return self.head, self.worker

    @property
    def gateway_address(self) -> str:
        """The machine's own address on the management network."""
        return State.of_running(self.folder).subnets.gateway

    @property
    def registry_reference(self) -> str:
        """The base image in the head's own registry."""
        return registry.reference()

    @property
    def is_up(self) -> bool:
        """Whether all processes of the lab run."""
        state = State.load(self.folder)
        return state is not None and all(process.alive for process in state.processes)

    def up(self) -> None:
        """Bring both nodes up, or only what is missing of them."""
        with self._locked(), termination_raises():
            if self.is_up:
                self._start_daemons()
                return
            self._clear()
            try:
                self._build()
            except BaseException:
                self._clear()
                raise

    def down(self, *, purge: bool = False) -> None:
        """End everything the lab started; with purge also forget images and the registry's content."""
        if not self.folder.exists():
            return
        with self._locked():
            self._clear()
            for name in ("nodes", "registry") if purge else ():
                shutil.rmtree(self.folder / name, ignore_errors=True)

    @contextmanager
    def session(self) -> Iterator["Lab"]:
        """Bring the lab up for a while, and always take it down."""
        with termination_raises():
            try:
                self.up()
                yield self
            finally:
                self.down()

    def add_host(self, name: str, address: str) -> None:
        """Make a name known on both nodes; the lab keeps the list in .lab/hosts."""
        line = f"{address} {name}\n"
        for path in (self.folder / "hosts", *(node.root / "etc/hosts" for node in self.nodes)):
            with path.open("a") as hosts:
                hosts.write(line)

    def trust_worker(self) -> None:
        """Let the head's owner know the worker's host key, by its management address."""
        key = " ".join((self._key("worker", "host").with_suffix(".pub")).read_text().split()[:2])
        line = f"{self.worker.management_address} {key}\n".encode()
        self.head.run(["sh", "-c", "cat >> ~/.ssh/known_hosts"], stdin=line)

    def load_base_image(self) -> None:
        """Put the base image on the worker without the product's help."""
        if not self.worker.docker("images", "-q", self.registry_reference):
            image = self.head.run(["docker", "save", self.registry_reference]).stdout
            self.worker.run(["docker", "load"], stdin=image)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @property
    def _uplink(self) -> str:
        return f"lab{self.identity}"

    def _clear(self) -> None:
        state = State.load(self.folder)
        for process in state.processes if state else []:
            process.kill()
        remove_uplink(self._uplink)
        for node in self.nodes:
            remove_control_groups(node.control_group)
            for name in ("root", "overlay", "scratch"):
                for path in node.files.glob(f"{name}*"):
                    shutil.rmtree(path)
        for name in ("state.json", "hosts"):
            (self.folder / name).unlink(missing_ok=True)

    def _build(self) -> None:
        with ExitStack() as pipes:
            holders = {node.name: self._start_holder(node, pipes) for node in self.nodes}
            switch = Holder.start_switch(self.folder / "switch.log")
            pipes.callback(switch.close)
            self._wire({name: holder.process for name, holder in holders.items()}, switch.process)
            for node in self.nodes:
                holders[node.name].describe(self._prepare(node))
            for holder in holders.values():
                holder.wait_ready()
            for node in self.nodes:
                self._furnish(node)
            self._start_daemons()
            self._finish()
            for holder in (*holders.values(), switch):
                holder.go()

    def _start_holder(self, node: LabNode, pipes: ExitStack) -> Holder:
        for name in ("root", "log", "docker", "scratch"):
            (node.files / name).mkdir(parents=True, exist_ok=True)
        holder = Holder.start_node(node.files / "log/boot.log")
        pipes.callback(holder.close)
        return holder

    def _wire(self, nodes: dict[str, Process], switch: Process) -> None:
        subnets = choose_subnets(int(self.identity, 16))
        State(subnets, switch, nodes).save(self.folder)
        Wiring(subnets, self._uplink, switch.pid, {name: node.pid for name, node in nodes.items()}).connect()

    def _prepare(self, node: LabNode) -> dict[str, Any]:
        lab, folder = node.files / "lab", node.files / "scratch"
        scratch.build_lab_folder(lab)
        binds = {"/var/lib/docker": str(node.files / "docker"), LOGS: str(node.files / "log"), "/var/lib/lab": str(lab)}
        binds |= {"/proc/meminfo": str(lab / "meminfo"), "/proc/swaps": str(lab / "swaps")}
        binds |= scratch.build_kernel_files(folder) | scratch.build_speeds(folder, node.role)
        if node.name == "head":
            binds |= registry.binds(self.folder)
        classes = folder / "class"
        addresses = {node.link_interface: node.link_address, node.twin_interface: node.twin_address}
        scratch.build_rdma(classes, node.role, self._hardware_addresses(node), addresses)
        return {
            "folder": str(node.files),
            "hostname": node.hostname,
            "checkout": str(self.checkout),
            "overlays": [str(place) for place in self._foreign_folders()],
            "class_folder": str(classes),
            "null_devices": scratch.RDMA_FILES,
            "binds": binds,
        }

    @staticmethod
    def _hardware_addresses(node: LabNode) -> dict[str, str]:
        argv = ("nsenter", f"--net=/proc/{node.pid}/ns/net", "ip", "-brief", "link")
        rows = [line.split() for line in command(*argv).splitlines()]
        return {row[0].partition("@")[0]: row[2] for row in rows}

    def _needed_folders(self) -> list[Path]:
        places = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), SOURCE, self.checkout]
        return list(dict.fromkeys(places))

    def _foreign_folders(self) -> list[Path]:
        """Those that an overlay of `/` alone does not show."""
        top = Path("/").stat().st_dev
        return [
            place
            for place in self._needed_folders()
            if not place.is_relative_to(self.checkout)
            and (place.stat().st_dev != top or any(place.is_relative_to(hidden) for hidden in HIDDEN_PLACES))
        ]

    def _furnish(self, node: LabNode) -> None:
        other = self.worker if node is self.head else self.head
        furniture = Furniture(
            hostname=node.hostname,
            addresses=[node.management_address, node.link_address, node.twin_address],
            user_key=self._key(node.name, "user").read_text(),
            user_public_key=self._key(node.name, "user").with_suffix(".pub").read_text(),
            host_key=self._key(node.name, "host").read_text(),
            host_public_key=self._key(node.name, "host").with_suffix(".pub").read_text(),
            authorized_key=self._key(other.name, "user").with_suffix(".pub").read_text(),
            stub=(STUBS / "stub.py").read_text(),
            runc=(STUBS / "runc.py").read_text(),
            python_folders=[str(place) for place in self._needed_folders()],
        )
        argv = [sys.executable, "-s", "-m", "tests.lab.furnish"]
        node.run(argv, user="root", stdin=furniture.to_json().encode(), env={"PYTHONPATH": str(SOURCE)})

    def _key(self, name: str, kind: str) -> Path:
        path = self.folder / "keys" / f"{name}_{kind}"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            comment = f"{LabNode.user}@{name}" if kind == "user" else name
            command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path)
        return path

    def _start_daemons(self) -> None:
        for node in self.nodes:
            node.launch_docker()
            node.start_sshd()
        registry.start(self.head)
        for node in self.nodes:
            node.wait_docker()

    def _finish(self) -> None:
        for node in self.nodes:
            left = node.docker("ps", "--all", "--quiet").split()
            if left:
                node.docker("rm", "--force", *left)
        for node in self.nodes:
            self.add_host(node.hostname, node.management_address)
        registry.publish_base(self.head, self.folder)
