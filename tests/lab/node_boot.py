"""The first process of a node: builds the node's root from a description on standard input, then keeps the node alive.

It holds the node's PID namespace, so ending it ends everything inside. Until the lab says `go` it lives only as long as
the pipe to the lab does: an `up` that is killed half way leaves nothing behind.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


def mount(*arguments: str | Path) -> None:
    """Call mount(8) without touching any table of mounts."""
    subprocess.run(["mount", "-n", *map(str, arguments)], check=True)


def bind(source: str | Path, target: Path) -> None:
    """Bind a file or a folder over a target, which is made where it is missing."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.mkdir() if Path(source).is_dir() else target.touch()
    mount("--rbind", source, target)


def remount(target: Path, mode: str) -> None:
    """Bind a folder over itself, read-only (`ro`) or writable (`rw`)."""
    mount("--bind", target, target)
    mount("-o", f"remount,bind,{mode}", target)


def overlay(lower: str | Path, writable: Path, target: Path) -> None:
    """Mount a writable overlay of one folder; what is written goes below `writable`."""
    for name in ("upper", "work"):
        (writable / name).mkdir(parents=True, exist_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    mount(
        *("-t", "overlay", "-o", f"lowerdir={lower},upperdir={writable}/upper,workdir={writable}/work"),
        "overlay",
        target,
    )


def make_device(path: Path, major: int, minor: int) -> None:
    """Make a character device that everybody may use."""
    path.parent.mkdir(exist_ok=True)
    os.mknod(path, 0o020666, os.makedev(major, minor))
    path.chmod(0o666)


def mount_devices(dev: Path, null_devices: list[str]) -> None:
    """Give the node a /dev of its own; a shared /dev/shm would make two ranks take themselves for one machine."""
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", dev)
    for name, minor in DEVICES.items():
        make_device(dev / name, 1, minor)
    make_device(dev / "tty", 5, 0)
    for name in null_devices:
        make_device(dev / name, 1, 3)
    for name, target in {**LINKS, "ptmx": "pts/ptmx"}.items():
        (dev / name).symlink_to(target)
    for name, kind, options in (
        ("pts", "devpts", "newinstance,ptmxmode=0666,mode=620,gid=5"),
        ("shm", "tmpfs", "mode=1777"),
    ):
        (dev / name).mkdir()
        mount("-t", kind, "-o", options, kind, dev / name)


def mount_kernel(root: Path, class_folder: str) -> None:
    """Mount /proc and /sys of the node's namespaces, so that nothing written there reaches the machine."""
    mount("-t", "proc", "proc", root / "proc")
    remount(root / "proc/sys", "ro")
    remount(root / "proc/sys/net", "rw")
    if (root / "proc/sysrq-trigger").exists():
        mount("--bind", "/dev/null", root / "proc/sysrq-trigger")
    mount("-t", "sysfs", "-o", "ro", "sysfs", root / "sys")
    mount("--rbind", "/sys/fs/cgroup", root / "sys/fs/cgroup")
    classes = root / "sys/class"
    mount("-t", "overlay", "-o", f"ro,lowerdir={class_folder}:{classes}", "overlay", classes)


def build_root(spec: dict[str, Any]) -> Path:
    """Put the node's file system together and return where it is mounted."""
    folder = Path(spec["folder"])
    root = folder / "root"
    overlay("/", folder / "overlay", root)
    mount_kernel(root, spec["class_folder"])
    mount_devices(root / "dev", spec["null_devices"])
    for name, mode in (("run", "755"), ("tmp", "1777")):
        mount("-t", "tmpfs", "-o", f"mode={mode}", "tmpfs", root / name)
    for position, place in enumerate(spec["overlays"]):
        overlay(place, folder / f"overlay-{position}", root / place.lstrip("/"))
    checkout = root / spec["checkout"].lstrip("/")
    bind(spec["checkout"], checkout)  # not through the overlay, which would go on showing files replaced since `up`
    mount("-o", "remount,bind,ro", checkout)
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", checkout / ".lab")
    for target, source in spec["binds"].items():
        bind(source, root / target.lstrip("/"))
    return root


def enter_root(root: Path) -> None:
    """Make the folder the root of this mount namespace and let go of the machine's."""
    os.chdir(root)
    subprocess.run(["pivot_root", ".", "mnt"], check=True)
    os.chdir("/")
    subprocess.run(["umount", "-n", "--lazy", "/mnt"], check=True)


def main() -> None:
    """Say who we are, build, say that it is done, wait for `go`, and stay."""
    print(Path("/proc/self").readlink(), flush=True)  # the machine's /proc is still here: the machine's number
    spec = json.loads(sys.stdin.readline())
    socket.sethostname(spec["hostname"])
    enter_root(build_root(spec))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel then reaps the orphans of the node
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        sys.exit(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
