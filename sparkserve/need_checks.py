"""Rules over what a plan needs of the nodes: room, ports, files, root, and an API that only clients with a key use."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from sparkserve.checks import Check, DiskNeed, Subject, show_size, verdict
from sparkserve.cluster import Role
from sparkserve.parameters import decide_ports
from sparkserve.settings import variable_name
from sparkserve.system import DiskFacts, PortFacts

# Room that stays free on every file system that is written, for logs and the engine's own small files.
_DISK_MARGIN = 2_000_000_000
_LEAST_INODES = 1000


def check_disks(subject: Subject) -> list[Check]:
    """Check every file system that will be written, with the needs that fall on the same one added up."""
    grouped: dict[tuple[Role, int], list[DiskNeed]] = {}
    checks = []
    for need in subject.needs:
        facts = subject.system.get(need.node)
        disk = facts.disks.get(need.place) if facts else None
        if disk is not None and not disk.error:
            grouped.setdefault((need.node, disk.device), []).append(need)
        elif disk is not None and need.size:
            checks.append(Check("disk", need.node, "unseen", f"{disk.path}: {disk.error}", show_size(need.size)))
    for (node, _), together in grouped.items():
        if any(need.size for need in together):
            disks = [subject.system[node].disks[need.place] for need in together]
            checks += [_check_room(node, disks[0], together), *_check_writable(subject, node, together)]
    return checks


def _check_room(node: Role, disk: DiskFacts, needs: list[DiskNeed]) -> Check:
    total = sum(need.size for need in needs) + _DISK_MARGIN
    parts = ", ".join(f"{need.what} {show_size(need.size)}" for need in needs if need.size)
    enough = disk.free >= total and (disk.free_inodes is None or disk.free_inodes > _LEAST_INODES)
    inodes = "" if disk.free_inodes is None else f", {disk.free_inodes} inodes"
    observed = f"{disk.path}: {show_size(disk.free)} free{inodes}"
    needed = f"{show_size(total)} ({parts}, and {show_size(_DISK_MARGIN)} to spare)"
    return Check("disk", node, verdict(good=enough), observed, needed)


def _check_writable(subject: Subject, node: Role, needs: list[DiskNeed]) -> list[Check]:
    user = subject.system[node].user
    disks = [subject.system[node].disks[need.place] for need in needs if need.place != "docker"]
    return [
        Check(
            "writable",
            node,
            verdict(good=disk.writable),
            f"{disk.path} can{'' if disk.writable else 'not'} be written",
            "a writable directory",
            "" if disk.writable else f"sudo {'chown' if disk.exists else 'install -d -o'} {user} {disk.path}",
        )
        for disk in dict.fromkeys(disks)
    ]


def check_ports(subject: Subject) -> list[Check]:
    """Check that the ports which the pair will open are free on both nodes, or say who holds them."""
    wanted = decide_ports(subject.settings, subject.recipe)
    named = {"api": wanted.api, "master": wanted.master}
    return [
        _check_port(subject, role, (name, port), facts.ports[port])
        for role, facts in subject.system.items()
        for name, port in named.items()
        if port in facts.ports
    ]


def _check_port(subject: Subject, role: Role, named: tuple[str, int], found: PortFacts) -> Check:
    name, port = named
    # Both ports are opened by rank 0, whose process another account may not look at.
    ours = found.ours or (role == "head" and subject.system[role].serves)
    state = "free" if found.free else f"held by {'our own rank' if ours else found.holder}"
    observed = f"port {port} ({name}): {state}"
    who = f"sudo ss -ltnp 'sport = :{port}' shows who holds it"
    who = f"docker stop {found.container}" if found.container else who
    hint = f"{who}; or set {variable_name(name + '_port')}"
    good = found.free or ours
    return Check("port", role, verdict(good=good), observed, "a free port", "" if good else hint)


def check_sources(kinds: Mapping[Role, Mapping[str, str]]) -> list[Check]:
    """Check that every file and device which the containers will be given is there and can be looked at."""
    return [
        Check("source", role, "fail", f"{path}: {kind}", "a file or device for the container")
        for role, found in kinds.items()
        for path, kind in found.items()
        if kind in ("missing", "unreadable")
    ]


def check_sudo(subject: Subject) -> list[Check]:
    """Check that what needs root will not stop half-way for a password; without a plan, whether it could."""
    rooted = subject.rooted
    has_file = subject.settings.sudo_password_file is not None
    return [
        Check(
            "sudo",
            role,
            verdict(
                good=facts.sudo in ("root", "free")
                or (facts.sudo == "password" and (has_file if rooted is None else rooted[role])),
                bad="warn" if rooted is None else "fail",
            ),
            f"sudo: {facts.sudo}",
            "root for the tuning step",
        )
        for role, facts in subject.system.items()
        if rooted is None or role in rooted
    ]


def check_api_key(subject: Subject) -> list[Check]:
    """Check that an API beyond loopback has a key; one that is open by the owner's own word is told all the same."""
    host, key, is_open = subject.settings.api_host, subject.settings.api_key_file, subject.settings.api_open
    if subject.unread_key:
        return [
            Check("api_key", "head", "fail", subject.unread_key.message, "loopback, or a key", subject.unread_key.hint)
        ]
    observed = f"the API listens on {host} {'with' if key else 'without'} a key"
    good = verdict(good=key is not None or ipaddress.ip_address(host).is_loopback, bad="warn" if is_open else "fail")
    return [Check("api_key", "head", good, observed, "loopback, or a key")]
