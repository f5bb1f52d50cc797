"""Rules over what a plan needs of the nodes: room, ports, files, root, and an API that only clients with a key use."""

from __future__ import annotations

import shlex

from sparkserve.addresses import is_loopback
from sparkserve.checks import Check, DiskNeed, Subject, show_size, verdict
from sparkserve.cluster import Role
from sparkserve.errors import SparkserveError
from sparkserve.parameters import check_exposure, decide_ports
from sparkserve.settings import variable_name
from sparkserve.system import DiskFacts, PortFacts, SystemFacts

# Room that stays free on every file system that is written, for logs and the engine's own small files.
_DISK_MARGIN = 2_000_000_000
_LEAST_INODES = 1000
_WRITABLE = "a writable directory"


def check_disks(subject: Subject) -> list[Check]:
    """Check every file system that will be written, with the needs that fall on the same one added up."""
    grouped: dict[tuple[Role, int], list[DiskNeed]] = {}
    checks = [check for role, facts in subject.system.items() for check in _check_directories(role, facts)]
    for need in subject.needs:
        facts = subject.system.get(need.node)
        disk = facts.disks.get(need.place) if facts else None
        if disk is not None and not (disk.error or disk.blocked_by):
            grouped.setdefault((need.node, disk.device), []).append(need)
        elif disk is not None and disk.error and need.size:
            observed, hint = f"{disk.path}: {disk.error}", f"ls -ld {shlex.quote(disk.path)}"
            checks.append(Check("disk", need.node, "unseen", observed, show_size(need.size), hint))
            if need.place != "docker":
                checks.append(Check("writable", need.node, "unseen", observed, _WRITABLE, hint))
    for (node, _), together in grouped.items():
        if any(need.size for need in together):
            disks = [subject.system[node].disks[need.place] for need in together]
            checks += [_check_room(node, disks[0], together), *_check_writable(subject, node, together)]
    return checks


def _check_directories(role: Role, facts: SystemFacts) -> list[Check]:
    """Refuse a file in the place of a directory, whatever will be written there."""
    blocked = {disk.blocked_by: None for disk in facts.disks.values() if disk.blocked_by}
    hint = "set SPARKSERVE_MODELS_DIR or SPARKSERVE_CACHE_DIR to a directory, or move the file away"
    return [Check("writable", role, "fail", f"{file} is a file", "a directory", hint) for file in blocked]


def _check_room(node: Role, disk: DiskFacts, needs: list[DiskNeed]) -> Check:
    total = sum(need.size for need in needs) + _DISK_MARGIN
    parts = ", ".join(f"{need.what} {show_size(need.size)}" for need in needs if need.size)
    enough = disk.free >= total and (disk.free_inodes is None or disk.free_inodes > _LEAST_INODES)
    inodes = "" if disk.free_inodes is None else f", {disk.free_inodes} inodes"
    observed = f"{disk.path}: {show_size(disk.free)} free{inodes}"
    needed = f"{show_size(total)} ({parts}, and {show_size(_DISK_MARGIN)} to spare)"
    return Check("disk", node, verdict(good=enough), observed, needed)


def _check_writable(subject: Subject, node: Role, needs: list[DiskNeed]) -> list[Check]:
    user, checks = subject.system[node].user, []
    for disk in dict.fromkeys(subject.system[node].disks[need.place] for need in needs if need.place != "docker"):
        observed = f"{disk.path} can{'' if disk.writable else 'not'} be written"
        make = f"sudo {'chown' if disk.exists else 'install -d -o'} {user} {shlex.quote(disk.path)}"
        hint = "" if disk.writable else make
        checks.append(Check("writable", node, verdict(good=disk.writable), observed, _WRITABLE, hint))
    return checks


def check_ports(subject: Subject) -> list[Check]:
    """Check that the ports which the pair will open are free on both nodes, or say who holds them."""
    return [
        _check_port(subject, role, (name, port), facts.ports[port])
        for role, facts in subject.system.items()
        for name, port in decide_ports(subject.settings, subject.recipe).named.items()
        if port in facts.ports
    ]


def _check_port(subject: Subject, role: Role, named: tuple[str, int], found: PortFacts) -> Check:
    name, port = named
    # A rank may open any of them on its own node (SGLang's rank 1 holds the API's), and another account's process
    # cannot be looked at. What a container of somebody else's holds is no rank's.
    ours = found.ours or (subject.system[role].serves and not found.container)
    holder = f"held by {'our own rank' if ours else found.holder}"
    state = "free" if found.free else holder if found.free is False else f"could not be tried: {found.holder}"
    who = f"sudo ss -ltnp 'sport = :{port}' shows who holds it"
    who = f"docker stop {found.container}" if found.container else who
    place = f"ports.more.{name} of the recipe" if name in subject.recipe.ports.more else variable_name(f"{name}_port")
    good = verdict(good=ours or found.free)
    hint = "" if good == "ok" else f"{who}; or set {place}"
    return Check("port", role, good, f"port {port} ({name}): {state}", "a free port", hint)


def check_sudo(subject: Subject) -> list[Check]:
    """Check that what needs root will not stop half-way for a password; without a plan, whether it could."""
    rooted, checks = subject.rooted, []
    for role, facts in subject.system.items():
        needed, mode, unread = "root for the tuning step", facts.sudo, subject.unread.get(("sudo", role))
        if mode.startswith("password") and unread:
            checks.append(Check("sudo", role, "fail", unread.message, needed, unread.hint))
        elif rooted is None or role in rooted:
            is_known = subject.settings.sudo_password_file is not None if rooted is None else rooted[role]
            good = mode in ("root", "free") or (mode.startswith("password") and is_known)
            judged = verdict(good=None if mode == "no answer" else good, bad="warn" if rooted is None else "fail")
            checks.append(Check("sudo", role, judged, f"sudo: {mode}", needed))
    return checks


def check_api_key(subject: Subject) -> list[Check]:
    """Check that an API beyond loopback has a key; one that is open by the owner's own word is told all the same."""
    settings, needed = subject.settings, "loopback, or a key"
    try:
        if unread := subject.unread.get(("api_key", "head")):
            raise unread
        check_exposure(settings, subject.recipe)
    except SparkserveError as error:
        return [Check("api_key", "head", "fail", error.message, needed, error.hint)]
    host, key = settings.api_host, settings.api_key_file
    observed = f"the API listens on {host} {'with' if key else 'without'} a key"
    is_open = settings.api_open and not key and not is_loopback(host)
    return [Check("api_key", "head", "warn" if is_open else "ok", observed, needed)]
