"""The scratch trees that make a node look like a DGX Spark and keep its writes away from the machine.

Nothing here is real: kernel knobs, memory figures, swap and RDMA devices are plain files laid over the real places.
"""

import os
import shutil
from pathlib import Path

from tests.lab.network import Port, Role

GIB_IN_KIB = 1024 * 1024
MEMINFO = {  # an idle DGX Spark, in kB
    "MemTotal": 125_513_372, "MemFree": 116_402_188, "MemAvailable": 119_204_860, "Buffers": 212_404,
    "Cached": 3_904_112, "SwapCached": 0, "Active": 2_104_332, "Inactive": 3_301_720, "Active(anon)": 1_204_212,
    "Inactive(anon)": 0, "Active(file)": 900_120, "Inactive(file)": 3_301_720, "Unevictable": 32, "Mlocked": 32,
    "SwapTotal": 16_777_212, "SwapFree": 16_777_212, "Zswap": 0, "Zswapped": 0, "Dirty": 120, "Writeback": 0,
    "AnonPages": 1_289_604, "Mapped": 604_120, "Shmem": 12_404, "KReclaimable": 402_388, "Slab": 702_120,
    "SReclaimable": 402_388, "SUnreclaim": 299_732, "KernelStack": 14_112, "PageTables": 24_020, "SecPageTables": 0,
    "NFS_Unstable": 0, "Bounce": 0, "WritebackTmp": 0, "CommitLimit": 79_533_896, "Committed_AS": 6_120_440,
    "VmallocTotal": 133_143_592_960, "VmallocUsed": 120_440, "VmallocChunk": 0, "Percpu": 21_120,
    "HardwareCorrupted": 0, "AnonHugePages": 0, "ShmemHugePages": 0, "ShmemPmdMapped": 0, "FileHugePages": 0,
    "FilePmdMapped": 0, "CmaTotal": 131_072, "CmaFree": 118_784, "HugePages_Total": 0, "HugePages_Free": 0,
    "HugePages_Rsvd": 0, "HugePages_Surp": 0, "Hugepagesize": 2_048, "Hugetlb": 0,
}  # fmt: skip
WITHOUT_UNIT = {"HugePages_Total", "HugePages_Free", "HugePages_Rsvd", "HugePages_Surp"}
SWAPS = (
    "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
    "/swap.img                               file\t\t16777212\t0\t\t-2\n"
)
BUDDYINFO = (
    "Node 0, zone      DMA      8      6      5      4      3      2      2      1      1      1    480 \n"
    "Node 0, zone   Normal   1412    904    611    402    240    151     96     60     41     27  27310 \n"
)
KERNEL_KNOBS = {  # what a stock system answers; everything else below /proc/sys/vm is copied from the machine
    "swappiness": "60", "min_free_kbytes": "67584", "watermark_scale_factor": "10", "watermark_boost_factor": "15000",
    "compaction_proactiveness": "20", "overcommit_memory": "0", "dirty_ratio": "20", "dirty_background_ratio": "10",
    "drop_caches": "0", "compact_memory": "0",
}  # fmt: skip
HUGE_PAGES = {"enabled": "always [madvise] never\n", "defrag": "always defer defer+madvise [madvise] never\n"}
STATES = {
    True: {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "200 Gb/sec (4X HDR)"},
    False: {"state": "1: DOWN", "phys_state": "3: Disabled", "rate": "40 Gb/sec (4X QDR)"},
}
GID_COUNT = 8
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
RDMA_FILES = ["infiniband/rdma_cm", *(f"infiniband/uverbs{number}" for number in range(4))]


def write_meminfo(path: Path, values: dict[str, int]) -> None:
    """Write the file in place and in one go: a bind mount follows the inode, and readers never see half of it."""
    lines = [f"{name + ':':<16}{value:>12}{'' if name in WITHOUT_UNIT else ' kB'}\n" for name, value in values.items()]
    content = "".join(lines).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)


def read_meminfo(path: Path) -> dict[str, int]:
    """Read a meminfo file as numbers (kB, or counts where the kernel gives none)."""
    pairs = (line.split(":", 1) for line in path.read_text().splitlines())
    return {name: int(rest.split()[0]) for name, rest in pairs}


def build_lab_folder(folder: Path) -> None:
    """Make what the node has at /var/lib/lab: open to everybody, containers included."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "answers").mkdir(parents=True)
    write_meminfo(folder / "meminfo", MEMINFO)
    (folder / "swaps").write_text(SWAPS)
    (folder / "swaps.on").write_text(SWAPS)
    (folder / "calls.log").touch()
    for path in (folder, *folder.iterdir()):
        path.chmod(0o777 if path.is_dir() else 0o666)


def build_kernel_files(folder: Path) -> dict[str, str]:
    """Make the scratch files of the kernel's knobs; returns target -> source for binding."""
    memory, settings = folder / "vm", folder / "sysctl.d"
    memory.mkdir(parents=True)
    settings.mkdir()
    for real in Path("/proc/sys/vm").iterdir():
        readable = real.stat().st_mode & 0o400
        value = KERNEL_KNOBS.get(real.name) or (real.read_text().strip() if readable else "0")
        (memory / real.name).write_text(value + "\n")
        (memory / real.name).chmod(real.stat().st_mode & 0o777)
    binds = {"/proc/sys/vm": str(memory), "/etc/sysctl.d": str(settings), "/usr/lib/sysctl.d": str(settings)}
    for name, text in HUGE_PAGES.items():
        target = Path("/sys/kernel/mm/transparent_hugepage", name)
        if target.exists():
            (folder / name).write_text(text)
            binds[str(target)] = str(folder / name)
    (folder / "buddyinfo").write_text(BUDDYINFO)
    return {**binds, "/proc/buddyinfo": str(folder / "buddyinfo")}


def build_speeds(folder: Path, role: Role) -> dict[str, str]:
    """Let the cabled interfaces report what a ConnectX-7 port reports; a veth says 10 Gb/s."""
    (folder / "speed").write_text("200000\n")
    cabled = [port.interface for port in role.ports if port.cabled]
    return {f"/sys/devices/virtual/net/{interface}/speed": str(folder / "speed") for interface in cabled}


def build_rdma(folder: Path, role: Role, hardware: dict[str, str], addresses: dict[str, str]) -> None:
    """Make the class folder with four RDMA devices; hardware (MAC) and IPv4 addresses are given by interface."""
    for port in role.ports:
        device = folder / "infiniband" / port.rdma_device
        (device / "device/net" / port.interface).mkdir(parents=True)
        number = device / "ports/1"
        for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (number / name).mkdir(parents=True)
        for name, value in {**STATES[port.cabled], "link_layer": "Ethernet"}.items():
            (number / name).write_text(value + "\n")
        _write_gids(number, port, _gid_table(role, hardware[port.interface], addresses.get(port.interface)))


def _gid_table(role: Role, hardware: str, address: str | None) -> dict[int, tuple[str, str]]:
    if address is None:
        return {}
    local, mapped = _link_local_gid(hardware), _mapped_gid(address)
    first, second = "IB/RoCE v1", "RoCE v2"
    return {
        0: (local, first),
        1: (local, second),
        role.gid_index - 1: (mapped, first),
        role.gid_index: (mapped, second),
    }


def _write_gids(number: Path, port: Port, table: dict[int, tuple[str, str]]) -> None:
    for index in range(GID_COUNT):
        gid, kind = table.get(index, (NO_GID, None))
        (number / f"gids/{index}").write_text(gid + "\n")
        if kind:  # the kernel refuses to read these two for an empty entry; here they are missing
            (number / f"gid_attrs/types/{index}").write_text(kind + "\n")
            (number / f"gid_attrs/ndevs/{index}").write_text(port.interface + "\n")


def _link_local_gid(hardware: str) -> str:
    octets = [int(part, 16) for part in hardware.split(":")]
    octets[0] ^= 2
    words = [f"{a:02x}{b:02x}" for a, b in zip(*[iter([*octets[:3], 0xFF, 0xFE, *octets[3:]])] * 2, strict=True)]
    return ":".join(["fe80", "0000", "0000", "0000", *words])


def _mapped_gid(address: str) -> str:
    first, second, third, fourth = (int(part) for part in address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{first:02x}{second:02x}:{third:02x}{fourth:02x}"
