"""Preflight: pure rules over settings, recipe and facts; every failure is found before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from sparkserve.cluster import Role
from sparkserve.errors import DOCKER_PROBLEMS, EXIT_NOT_READY, Failures, SparkserveError
from sparkserve.link import LinkFacts
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings, variable_name
from sparkserve.system import SystemFacts

Verdict = Literal["ok", "warn", "fail"]
_GIB = 1024**3
_ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
# Room that stays free on every file system that is written, for logs and the engine's own small files.
_DISK_MARGIN = 2_000_000_000


@dataclass(frozen=True)
class Check:
    """One rule applied to one node (or to the pair)."""

    id: str
    node: str
    verdict: Verdict
    observed: str
    needed: str
    hint: str = ""


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that will be written on a node below one of its places (models, cache, docker)."""

    node: Role
    place: str
    size: int
    what: str


def raise_failures(checks: Iterable[Check]) -> None:
    """Raise every failed check as one error that lists them all."""
    failed = [
        SparkserveError(
            f"check_{check.id}",
            f"{check.observed}; needed: {check.needed}",
            check.hint,
            check.node,
            exit_code=EXIT_NOT_READY,
        )
        for check in checks
        if check.verdict == "fail"
    ]
    if failed:
        raise Failures(failed)


def check_basics(recipe: Recipe, system: Mapping[Role, SystemFacts]) -> list[Check]:
    """Check what every step needs: the Docker engine, tools, the right architecture, two different machines."""
    checks = []
    for role, facts in system.items():
        error = facts.docker.error
        observed, hint = DOCKER_PROBLEMS.get(error, (f"the Docker engine: {facts.docker.version}", ""))
        checks.append(
            Check(
                "docker",
                role,
                "fail" if error else "ok",
                observed,
                "an engine that this account can reach",
                hint,
            )
        )
        missing = [name for name, path in facts.tools.items() if path is None]
        hint = f"sudo apt-get install {' '.join('openssh-client' if tool == 'ssh' else tool for tool in missing)}"
        observed = f"not on PATH: {', '.join(missing)}" if missing else "all tools there"
        checks.append(Check("tools", role, "fail" if missing else "ok", observed, ", ".join(facts.tools), hint))
        checks.append(_check_architecture(recipe, role, facts))
    return checks


def _check_architecture(recipe: Recipe, role: str, facts: SystemFacts) -> Check:
    wanted = recipe.image.architecture
    found = _ARCHITECTURES.get(facts.machine, facts.machine)
    good = wanted in ("any", found)
    return Check(
        "architecture", role, "ok" if good else "fail", f"the machine is {found}", wanted, "choose a recipe for it"
    )


def check_link(settings: Settings, links: Mapping[Role, LinkFacts], *, rdma: bool) -> list[Check]:
    """Check that each node owns its link address, both ends agree on the MTU, and RDMA devices have a GID."""
    checks = []
    for role, facts in links.items():
        key = variable_name("head_link" if role == "head" else "worker_link")
        have = ", ".join(f"{item.name} {address}" for item in facts.interfaces for address in item.addresses)
        if not facts.interface:
            observed = f"no interface owns {facts.address}" if facts.address else f"{key} is not set"
            hint = f"set {key} in .env to one of: {have or 'none found'}"
            checks.append(Check("link_address", role, "fail", observed, "the address of the cable's interface", hint))
            continue
        checks.append(Check("link_address", role, "ok", f"{facts.interface} owns {facts.address}", "an interface"))
        if rdma and facts.gid_index is None:
            observed = f"no active RDMA device of {facts.interface} has a RoCE v2 address for {facts.address}"
            hint = "is the cable in? `ibdev2netdev` shows which ports are up"
            checks.append(Check("link_rdma", role, "fail", observed, "a RoCE v2 GID of the link address", hint))
    sizes = {role: facts.mtu for role, facts in links.items() if facts.interface}
    if len(set(sizes.values())) > 1:
        observed = ", ".join(f"{role} {mtu}" for role, mtu in sizes.items())
        checks.append(
            Check("link_mtu", "", "fail", f"MTU differs: {observed}", "the same on both ends", "set both in netplan")
        )
    if settings.head_link and settings.head_link == settings.worker_link:
        checks.append(
            Check("link_same", "", "fail", "both link addresses are the same", "one per node", "correct .env")
        )
    return checks


def check_ports(recipe_ports: Mapping[str, int], system: Mapping[Role, SystemFacts]) -> list[Check]:
    """Check that the ports which the pair will open are free on both nodes."""
    return [
        Check(
            "port",
            role,
            "ok" if facts.ports[port] == "free" else "fail",
            f"port {port} ({name}): {facts.ports[port]}",
            "a free port",
            f"sudo ss -ltnp 'sport = :{port}' shows who holds it; or set {variable_name(name + '_port')}",
        )
        for role, facts in system.items()
        for name, port in recipe_ports.items()
    ]


def check_memory(recipe: Recipe, system: Mapping[Role, SystemFacts]) -> list[Check]:
    """Check MemAvailable of each node against what the recipe needs before a start."""
    needed = recipe.memory.required_gib
    return [
        Check(
            "memory",
            role,
            "ok" if facts.available >= needed * _GIB else "fail",
            f"{facts.available / _GIB:.1f} GiB of memory available",
            f"{needed:g} GiB",
            "close other programs: `ps aux --sort=-rss | head` shows the largest",
        )
        for role, facts in system.items()
    ]


def check_sources(kinds: Mapping[Role, Mapping[str, str]]) -> list[Check]:
    """Check that every file and device which the containers will be given is there and can be looked at."""
    return [
        Check("source", role, "fail", f"{path}: {kind}", "a file or device for the container", "`sparkserve up`")
        for role, found in kinds.items()
        for path, kind in found.items()
        if kind in ("missing", "unreadable")
    ]


def check_disks(needs: Iterable[DiskNeed], system: Mapping[Role, SystemFacts]) -> list[Check]:
    """Check every file system that will be written, with the needs that fall on the same one added up."""
    grouped: dict[tuple[Role, int], list[DiskNeed]] = {}
    for need in needs:
        grouped.setdefault((need.node, system[need.node].disks[need.place].device), []).append(need)
    checks = []
    for (node, _), together in grouped.items():
        disk = system[node].disks[together[0].place]
        total = sum(need.size for need in together)
        if total == 0:
            continue
        parts = ", ".join(f"{need.what} {show_size(need.size)}" for need in together if need.size)
        enough = disk.free >= total + _DISK_MARGIN and (disk.free_inodes is None or disk.free_inodes > 1000)
        inodes = "" if disk.free_inodes is None else f", {disk.free_inodes} inodes"
        observed = f"{disk.path}: {show_size(disk.free)} free{inodes}"
        needed = f"{show_size(total + _DISK_MARGIN)} ({parts}, and {show_size(_DISK_MARGIN)} to spare)"
        hint = f"free some space, or set {variable_name('models_dir')} to a larger disk"
        checks.append(Check("disk", node, "ok" if enough else "fail", observed, needed, hint))
        unwritable = [
            need for need in together if need.place != "docker" and not system[node].disks[need.place].writable
        ]
        for need in unwritable:
            path = system[node].disks[need.place].path
            hint = f"sudo install -d -o {system[node].user} {path}"
            checks.append(Check("writable", node, "fail", f"{path} cannot be written", "a writable directory", hint))
    return checks


def check_sudo(facts: SystemFacts, role: str, *, have_password: bool) -> Check:
    """Check that the changes which need root can be made without stopping half-way for a password."""
    good = facts.sudo in ("root", "free") or (facts.sudo == "password" and have_password)
    hint = "run it on a terminal, set SPARKSERVE_SUDO_PASSWORD_FILE, or leave it out with --skip tune"
    return Check("sudo", role, "ok" if good else "fail", f"sudo: {facts.sudo}", "root for the tuning step", hint)


def show_size(size: int) -> str:
    """Show bytes in GB and GiB, since a mix-up of the two decides whether 500 are enough."""
    if size < 100_000_000:
        return f"{size / 1e6:.1f} MB"
    return f"{size / 1e9:.1f} GB ({size / _GIB:.1f} GiB)"
