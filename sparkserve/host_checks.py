"""Rules over what was seen of one node (pure)."""

from __future__ import annotations

from collections.abc import Callable

from sparkserve.check_catalog import KNOWN_BAD_KERNELS
from sparkserve.checks import GIB, Check, Subject, could_not_look, show_size, verdict
from sparkserve.cluster import Role
from sparkserve.errors import DOCKER_PROBLEMS
from sparkserve.system import OOM_DAEMONS, TOOLS, SystemFacts

Rule = Callable[[Subject, Role, SystemFacts], Check]
_ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
_LEAST_PYTHON = (3, 9)
_FAR_AWAY = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "fuse.sshfs"}
# Loads were seen to fail below this much MemFree, and with less than half of this in large pieces.
_LEAST_FREE = 8 * GIB
_LEAST_LARGE = 1 * GIB
_SWAPPED = 1 * GIB
# Whichever of these a recipe sets, its ranks do not look their own names up.
_PINS = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP"}


def _docker(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    error = facts.docker.error
    version = f"the Docker engine: {facts.docker.version}"
    observed, hint = DOCKER_PROBLEMS.get(error, (version, ""))
    good = verdict(good=None if error in ("timeout", "failed") else not error)
    return Check("docker", role, good, observed, "an engine that this account can reach", hint)


def _tools(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    missing = [name for name in TOOLS[role] if not facts.tools.get(name)]
    packages = {"ssh": "openssh-client", "docker": "docker.io"}
    hint = f"sudo apt-get install {' '.join(packages.get(tool, tool) for tool in missing)}" if missing else ""
    observed = f"not on PATH: {', '.join(missing)}" if missing else "all tools there"
    return Check("tools", role, verdict(good=not missing), observed, ", ".join(TOOLS[role]), hint)


def _architecture(subject: Subject, role: Role, facts: SystemFacts) -> Check:
    wanted = subject.recipe.image.architecture
    found = _ARCHITECTURES.get(facts.machine, facts.machine)
    good = wanted in ("any", found)
    return Check("architecture", role, verdict(good=good), f"the machine is {found}", wanted)


def _python(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    words = facts.python.split(".")[:2]
    good = tuple(map(int, words)) >= _LEAST_PYTHON if all(word.isdigit() for word in words) else None
    needed = f"{'.'.join(map(str, _LEAST_PYTHON))} or newer"
    return Check("python", role, verdict(good=good), f"python3 is {facts.python or 'of no known version'}", needed)


def _kernel(subject: Subject, role: Role, facts: SystemFacts) -> Check:
    """Whether the kernel is known to keep memory from RDMA, by its name and by its tell-tale."""
    needed = "a kernel that leaves RDMA its memory"
    if not facts.kernel or not facts.memory:
        return could_not_look("kernel", role, "uname -r && cat /proc/meminfo", needed)
    listed = facts.kernel.startswith(KNOWN_BAD_KERNELS) and "kho=off" not in facts.kernel_options.split()
    free, total = facts.memory.get("CmaFree", 0), facts.memory.get("CmaTotal", 0)
    observed = facts.kernel + (", of a kind with which RDMA was seen to fail" if listed else "")
    if free > total:
        observed += f"; CmaFree {show_size(free)} is more than CmaTotal {show_size(total)}, the sign of it"
    certain = listed and free > total and subject.uses_rdma
    good = verdict(good=not listed and free <= total, bad="fail" if certain else "warn")
    return Check("kernel", role, good, observed, needed)


def _gpu(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    needed = "a GPU whose driver answers"
    if facts.gpu:
        return Check("gpu", role, "ok", f"{facts.gpu[0]}, driver {facts.gpu[1]}", needed)
    good = None if facts.gpu_error == "no answer" else False
    return Check("gpu", role, verdict(good=good), f"nvidia-smi: {facts.gpu_error}", needed)


def _gpu_processes(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    needed = "no process of others on the GPU"
    if facts.gpu_processes is None:
        return could_not_look("gpu_processes", role, "nvidia-smi", needed)
    others = [one for one in facts.gpu_processes if not one.ours]
    named = [f"{one.name} (process {one.pid}{f' in {one.container}' if one.container else ''})" for one in others]
    hint = f"end it: {'; '.join(f'docker stop {o.container}' if o.container else f'kill {o.pid}' for o in others)}"
    good = verdict(good=not others, bad="warn")
    return Check("gpu_processes", role, good, ", ".join(named) or "none", needed, hint if others else "")


def _docker_group(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    """Whether this account may ask the Docker engine, now or after it logs in again."""
    needed = "membership of the docker group"
    if facts.in_docker_group or not facts.docker.error:
        return Check("docker_group", role, "ok", f"{facts.user} may ask the engine", needed)
    if None in (facts.docker_member, facts.in_docker_group):
        return could_not_look("docker_group", role, "id && getent group docker", needed)
    if facts.docker_member:
        observed, hint = f"{facts.user} is a member since this session began", "log out of that node and in again"
    else:
        observed, hint = f"{facts.user} is no member", f"sudo usermod -aG docker {facts.user}, then log in again"
    return Check("docker_group", role, "fail", observed, needed, hint)


def _docker_runtime(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    needed = "NVIDIA's container toolkit"
    if facts.docker.error:
        return could_not_look("docker_runtime", role, "docker version", needed)
    if "nvidia" in facts.docker.runtimes:
        observed = "Docker knows the runtime nvidia"
    elif facts.docker.cdi:
        observed = f"Docker knows no runtime nvidia, and gives {facts.docker.cdi[0]} by CDI"
    else:
        hook = "nvidia-container-runtime-hook"
        observed = f"Docker knows no runtime nvidia; {f'{hook} is there' if facts.gives_gpus else f'no {hook}'}"
    return Check("docker_runtime", role, verdict(good=facts.gives_gpus), observed, needed)


def _containers(subject: Subject, role: Role, facts: SystemFacts) -> Check:
    needed = "no container of others on the host's network"
    if facts.containers is None or ("containers", role) in subject.unread:
        return could_not_look("containers", role, "docker ps", needed)
    others = [one for one in facts.containers if not one.ours]
    named = [f"{one.name} ({', '.join(map(str, one.ports)) or one.image})" for one in others]
    shared = [one.name for one in others if one.on_host_network]
    observed = f"on the host's network: {', '.join(shared)}" if shared else ", ".join(named) or "none of others"
    hint = f"docker stop {' '.join(shared)}" if shared else ""
    return Check("containers", role, verdict(good=not shared, bad="warn"), observed, needed, hint)


def _memory(subject: Subject, role: Role, facts: SystemFacts) -> Check:
    """Whether a rank will fit; where one runs already, whether enough is left beside it."""
    memory = subject.recipe.memory
    needed = (memory.floor_gib if facts.serves else memory.required_gib) * GIB
    available = facts.memory.get("MemAvailable")
    if available is None:
        return could_not_look("memory", role, "cat /proc/meminfo", show_size(needed))
    observed = f"{show_size(available)} of memory available{' beside the rank that runs' * facts.serves}"
    good = verdict(good=available >= needed, bad="warn" if facts.serves else "fail")
    return Check("memory", role, good, observed, show_size(needed))


def _swap(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    needed = f"swap that is there, with less than {show_size(_SWAPPED)} in use"
    if facts.swap_used is None or not facts.memory:
        return could_not_look("swap", role, "cat /proc/swaps /proc/meminfo", needed)
    total = facts.memory.get("SwapTotal", 0)
    observed = f"{show_size(facts.swap_used)} of {show_size(total)} in use" if total else "no swap"
    good = verdict(good=total > 0 and facts.swap_used < _SWAPPED, bad="warn")
    hint = "" if total else "sudo fallocate -l 16G /swap.img && sudo chmod 600 /swap.img; then mkswap and swapon it"
    return Check("swap", role, good, observed, needed, hint)


def _oom_daemons(subject: Subject, role: Role, facts: SystemFacts) -> Check:
    """Whether just one daemon ends processes, and only where a rank that serves is in danger anyway."""
    least, floor = subject.recipe.memory.floor_gib * GIB, facts.earlyoom_floor
    if floor is not None and floor >= least:
        observed = f"earlyoom ends what is largest below {show_size(floor)} of memory available, once swap is short too"
        hint = f"give earlyoom `-M {int(least) // 2048}` (KiB) in /etc/default/earlyoom, and restart it"
        return Check("oom_daemons", role, "warn", observed, f"below {show_size(least)}, which a rank may reach", hint)
    found, needed = facts.oom_daemons, f"one of {' and '.join(OOM_DAEMONS)} at most"
    if found is None:
        return could_not_look("oom_daemons", role, f"systemctl is-active {' '.join(OOM_DAEMONS)}", needed)
    good = verdict(good=len(found) < 2, bad="warn")
    return Check("oom_daemons", role, good, f"running: {' and '.join(found) or 'none'}", needed)


def _page_cache(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    """Whether the driver finds free memory, and not only memory that the kernel could free."""
    free = facts.memory.get("MemFree")
    needed = f"{show_size(_LEAST_FREE)} free"
    if free is None:
        return could_not_look("page_cache", role, "cat /proc/meminfo", needed)
    cached = facts.memory.get("Cached", 0)
    observed = f"{show_size(free)} free, {show_size(cached)} in the page cache"
    return Check("page_cache", role, verdict(good=facts.serves or free >= _LEAST_FREE, bad="warn"), observed, needed)


def _fragmentation(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    """Whether free memory comes in large pieces; little free memory is the matter of other checks."""
    needed = f"{show_size(_LEAST_LARGE)} in pieces of 16 MiB, or the largest there are"
    if facts.large_free is None:
        return could_not_look("fragmentation", role, "cat /proc/buddyinfo", needed)
    days = f", up for {facts.uptime / 86400:.0f} days" if facts.uptime else ""
    scarce = facts.serves or facts.memory.get("MemFree", 0) < _LEAST_FREE
    good = verdict(good=scarce or facts.large_free >= _LEAST_LARGE, bad="warn")
    return Check("fragmentation", role, good, f"{show_size(facts.large_free)} in large pieces{days}", needed)


def _local_disk(_subject: Subject, role: Role, facts: SystemFacts) -> Check:
    kinds = {name: disk.filesystem for name, disk in facts.disks.items()}
    if not all(kinds.values()):
        return could_not_look("local_disk", role, "cat /proc/mounts", "disks of the node itself")
    good = not _FAR_AWAY & set(kinds.values())
    observed = ", ".join(f"{name}: {kind}" for name, kind in kinds.items())
    return Check("local_disk", role, verdict(good=good, bad="warn"), observed, "disks of the node itself")


def _hostname(subject: Subject, role: Role, facts: SystemFacts) -> Check:
    """Whether an engine that looks its own name up would wait on loopback."""
    launch = subject.recipe.launch
    pinned = _PINS & (launch.env.keys() | (launch.head_env if role == "head" else launch.worker_env).keys())
    needed = "an address of the node, or an interface that the recipe pins"
    if facts.own_addresses is None and not pinned:
        return could_not_look("hostname", role, f"getent ahostsv4 {facts.hostname}", needed)
    found = facts.own_addresses or ()
    where = ", ".join(found) or ("what could not be seen" if facts.own_addresses is None else "nothing")
    good = bool(found) and not any(one.startswith("127.") for one in found)
    observed = f"{facts.hostname} resolves to {where}" + (f"; the recipe sets {min(pinned)}" if pinned else "")
    return Check("hostname", role, verdict(good=good or bool(pinned), bad="warn"), observed, needed)


BASICS: tuple[Rule, ...] = (_docker, _docker_group, _tools, _architecture, _python)
BEFORE_START: tuple[Rule, ...] = (
    _kernel, _containers, _memory, _swap, _oom_daemons, _page_cache, _fragmentation, _local_disk, _hostname,
)  # fmt: skip
OF_GPUS: tuple[Rule, ...] = (_gpu, _docker_runtime, _gpu_processes)
