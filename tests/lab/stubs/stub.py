#!/usr/bin/python3 -IS
"""Stand-ins for the commands of a DGX Spark that a lab node cannot have; the name it is called by says which.

Every call is one JSON line in /var/lib/lab/calls.log. Answers can be planted in /var/lib/lab/answers: `COMMAND.out` is
printed instead of the usual answer, `COMMAND.exit` holds the exit code, `nvidia-smi.json` replaces single
GPU fields and `compute-apps.json` lists the processes on the GPU.
"""

import json
import os
import sys
import time
from pathlib import Path

LAB = Path("/var/lib/lab")
ANSWERS = LAB / "answers"
GPU = {
    "index": "0", "count": "1", "name": "NVIDIA GB10", "uuid": "GPU-6d2f0b1e-3c4a-5d6e-8f90-a1b2c3d4e5f6",
    "driver_version": "580.173.02", "pci.bus_id": "0000000F:01:00.0", "compute_cap": "12.1", "pstate": "P8",
    "persistence_mode": "Enabled", "memory.total": "[N/A]", "memory.used": "[N/A]", "memory.free": "[N/A]",
    "power.draw": "11.52 W", "power.limit": "[N/A]", "temperature.gpu": "42", "utilization.gpu": "0 %",
    "utilization.memory": "0 %", "clocks.gr": "208 MHz", "clocks.sm": "208 MHz", "clocks.mem": "[N/A]",
    "clocks.current.graphics": "208 MHz", "clocks.current.sm": "208 MHz", "clocks.max.gr": "3003 MHz",
    "clocks.max.sm": "3003 MHz", "clocks.max.graphics": "3003 MHz", "display_active": "Disabled",
    "clocks_event_reasons.active": "0x0000000000000001", "clocks_throttle_reasons.active": "0x0000000000000001",
    "clocks_event_reasons.hw_slowdown": "Not Active", "clocks_event_reasons.sw_power_cap": "Not Active",
}  # fmt: skip
CHANGES_CLOCKS = ("-lgc", "--lock-gpu-clocks", "-rgc", "--reset-gpu-clocks", "-pm", "--persistence-mode")
RUNNING_UNITS = {"docker", "containerd", "ssh", "sshd", "nvidia-persistenced", "systemd-journald", "NetworkManager"}


def record(command: str, arguments: list[str]) -> None:
    """Write one line about this call."""
    call = {"time": time.time(), "command": command, "arguments": arguments, "uid": os.getuid()}
    with (LAB / "calls.log").open("a") as log:
        log.write(json.dumps(call) + "\n")


def planted(command: str) -> int | None:
    """Give the planted answer, if there is one, and return its exit code."""
    output, code = ANSWERS / f"{command}.out", ANSWERS / f"{command}.exit"
    if output.exists():
        sys.stdout.write(output.read_text())
    if code.exists():
        return int(code.read_text())
    return 0 if output.exists() else None


def refuse(text: str, code: int = 1) -> int:
    """Complain on standard error."""
    print(text, file=sys.stderr)
    return code


def gpu_fields() -> dict[str, str]:
    """Read the fields of the GPU, planted ones first."""
    changed = ANSWERS / "nvidia-smi.json"
    return {**GPU, **(json.loads(changed.read_text()) if changed.exists() else {})}


def print_table(columns: list[str], rows: list[dict[str, str]], output_format: str) -> int:
    """Print rows in the CSV dialect of nvidia-smi."""
    options = output_format.split(",")
    if "noheader" not in options:
        print(", ".join(columns))
    for row in rows:
        values = [row[column] for column in columns]
        plain = [value.split(" ")[0] if value.endswith((" W", " %", " MHz", " MiB")) else value for value in values]
        print(", ".join(plain if "nounits" in options else values))
    return 0


def nvidia_smi(arguments: list[str]) -> int:
    """Answer like a GB10: one GPU whose memory figures are not available."""
    options = {name: value for name, _, value in (argument.partition("=") for argument in arguments)}
    fields, output_format = gpu_fields(), options.get("--format", "csv")
    if "--query-gpu" in options:
        return query_gpu(options["--query-gpu"].split(","), fields, output_format)
    if "--query-compute-apps" in options:
        apps = ANSWERS / "compute-apps.json"
        rows = json.loads(apps.read_text()) if apps.exists() else []
        return print_table(options["--query-compute-apps"].split(","), rows, output_format)
    if "-L" in options or "--list-gpus" in options:
        print(f"GPU 0: {fields['name']} (UUID: {fields['uuid']})")
    elif arguments and arguments[0].partition("=")[0] in CHANGES_CLOCKS:
        return (
            0 if os.geteuid() == 0 else refuse("Insufficient permissions. Terminating early due to previous errors.", 4)
        )
    elif arguments:
        print(f"Invalid combination of input arguments: {' '.join(arguments)}")
        return 2
    else:
        print(f"NVIDIA-SMI {fields['driver_version']}\n  0  {fields['name']}")
    return 0


def query_gpu(columns: list[str], fields: dict[str, str], output_format: str) -> int:
    """Print one row of GPU fields, or name the first that is not one."""
    for column in columns:
        if column not in fields:
            print(f'Field "{column}" is not a valid field to query.\n')
            return 2
    return print_table(columns, [fields], output_format)


def ibdev2netdev(_arguments: list[str]) -> int:
    """List the RDMA devices with their interfaces, from the node's own tree."""
    for device in sorted(Path("/sys/class/infiniband").iterdir()):
        state = (device / "ports/1/state").read_text()
        for interface in (device / "device/net").iterdir():
            print(f"{device.name} port 1 ==> {interface.name} ({'Up' if 'ACTIVE' in state else 'Down'})")
    return 0


def set_swap(text: str) -> int:
    """Rewrite the node's swap list and the swap lines of its memory figures, both in place."""
    if os.geteuid() != 0:
        return refuse("Operation not permitted")
    (LAB / "swaps").write_text(text)
    total = sum(int(line.split()[2]) for line in text.splitlines()[1:])
    lines = (LAB / "meminfo").read_text().splitlines(keepends=True)
    changed = [
        f"{line[:16]}{total:>12} kB\n" if line.startswith(("SwapTotal:", "SwapFree:")) else line for line in lines
    ]
    with (LAB / "meminfo").open("r+") as meminfo:
        meminfo.write("".join(changed))
    return 0


def swapoff(_arguments: list[str]) -> int:
    """Take all swap away."""
    return set_swap((LAB / "swaps.on").read_text().splitlines(keepends=True)[0])


def swapon(arguments: list[str]) -> int:
    """Show the swap areas, or bring them all back."""
    if any(argument.startswith(("--show", "-s")) for argument in arguments) or not arguments:
        sys.stdout.write((LAB / "swaps").read_text())
        return 0
    return set_swap((LAB / "swaps.on").read_text())


def systemctl(arguments: list[str]) -> int:
    """Keep a unit's state as a file; only root may change one."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    verb, units = (words[0], [word.removesuffix(".service") for word in words[1:]]) if words else ("list-units", [])
    if verb in {"is-active", "is-enabled"}:
        return report_units(verb, units, quiet="--quiet" in arguments or "-q" in arguments)
    if verb in {
        "start",
        "stop",
        "restart",
        "enable",
        "disable",
        "mask",
        "unmask",
        "reload",
        "daemon-reload",
        "set-default",
    }:
        return change_units(verb, units, now="--now" in arguments)
    return 0


def report_units(verb: str, units: list[str], *, quiet: bool) -> int:
    """Print the state of each unit; the exit code is that of the worst."""
    good, bad = {"is-active": ("active", "inactive"), "is-enabled": ("enabled", "disabled")}[verb]
    states = [unit_state(good, unit) for unit in units]
    if not quiet:
        print("\n".join(good if state else bad for state in states))
    return 0 if all(states) else {"is-active": 3, "is-enabled": 1}[verb]


def unit_state(good: str, unit: str) -> bool:
    """Look a unit up: what was changed here, else whether it belongs to a running system."""
    changed = LAB / "units" / f"{unit}.{good}"
    return changed.read_text() == "yes" if changed.exists() else unit in RUNNING_UNITS


def change_units(verb: str, units: list[str], *, now: bool) -> int:
    """Remember what was asked for."""
    if os.geteuid() != 0:
        return refuse("Failed to connect to bus: Interactive authentication required.")
    (LAB / "units").mkdir(exist_ok=True)
    up = verb in {"start", "restart", "enable", "reload"}
    kinds = ["enabled"] if verb in {"enable", "disable", "mask", "unmask"} else ["active"]
    for unit in units:
        for kind in [*kinds, *(["active"] if now else [])]:
            (LAB / "units" / f"{unit}.{kind}").write_text("yes" if up else "no")
    return 0


def runtime_hook(_arguments: list[str]) -> int:
    """Let `docker run --gpus all` start a container without a GPU."""
    return 0


COMMANDS = {
    "nvidia-smi": nvidia_smi, "ibdev2netdev": ibdev2netdev, "swapoff": swapoff, "swapon": swapon,
    "systemctl": systemctl, "nvidia-container-runtime-hook": runtime_hook,
}  # fmt: skip


def main() -> int:
    """Record the call and answer it."""
    command, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    record(command, arguments)
    code = planted(command)
    return COMMANDS[command](arguments) if code is None else code


if __name__ == "__main__":
    sys.exit(main())
