"""A healthy pair of Sparks as facts, to be changed by one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparkserve.checks import Subject
from sparkserve.cluster import ROLES, Role
from sparkserve.link import Interface, LinkFacts
from sparkserve.recipe_source import load_recipe
from sparkserve.settings import Settings
from sparkserve.system import DiskFacts, PortFacts, SystemFacts
from sparkserve.system_text import DockerFacts

GIB = 1024**3
SETTINGS = {"worker": "spark@192.168.1.22", "head_link": "10.100.8.1", "worker_link": "10.100.8.2"}
HOOK = "nvidia-container-runtime-hook"


def make_system(role: Role = "head", **changes: Any) -> SystemFacts:
    disks = {
        name: DiskFacts(path, device, 2 * 10**12, 4 * 10**12, 10**8, name != "docker", "ext4", exists=True)
        for name, path, device in (
            ("models", "/home/spark/models", 1), ("cache", "/home/spark/cache", 1), ("docker", "/var/lib/docker", 2)
        )
    }  # fmt: skip
    facts = SystemFacts(
        hostname=f"spark-{role}",
        user="spark",
        python="3.12.3",
        machine="aarch64",
        kernel="6.17.0-1032-nvidia",
        kernel_options="quiet splash",
        system="Ubuntu 24.04.3 LTS",
        uptime=86400.0,
        clock=(0.0, 0.001),
        memory={
            "MemTotal": 120 * GIB, "MemAvailable": 114 * GIB, "MemFree": 110 * GIB, "Cached": 3 * GIB,
            "SwapTotal": 16 * GIB, "CmaTotal": 128 << 20, "CmaFree": 116 << 20,
        },
        swap_used=0,
        large_free=100 * GIB,
        disks=disks,
        gpu=("NVIDIA GB10", "580.173.02"),
        gpu_error="",
        gpu_processes=(),
        docker=DockerFacts("", "28.3.3", "/var/lib/docker", "overlay2", ("nvidia", "runc")),
        docker_member=True,
        in_docker_group=True,
        containers=(),
        tools=dict.fromkeys(("git", "ssh", "docker", "rsync", "sudo", "nvidia-smi", HOOK), "/usr/bin/tool"),
        sudo="free",
        own_addresses=(f"192.168.1.2{ROLES.index(role)}",),
        oom_daemons=("systemd-oomd",),
        ports={8888: PortFacts(free=True), 29551: PortFacts(free=True)},
    )  # fmt: skip
    return replace(facts, **changes)


def make_link(role: Role = "head", **changes: Any) -> LinkFacts:
    address = SETTINGS[f"{role}_link"]
    cable = Interface("enp1s0f1np1", (address,), 9000, up=True, speed_mbps=200_000, networks=("10.100.8.0/24",))
    twin = replace(cable, name="enP2p1s0f1np1", addresses=("10.100.9.1",), networks=("10.100.9.0/24",))
    hcas = ("rocep1s0f1", "roceP2p1s0f1")
    facts = LinkFacts(address, cable.name, hcas, 3, twin.name, 9000, 200_000, (cable, twin))
    return replace(facts, **changes)


def make_subject(
    *, system: dict[Role, Any] | None = None, links: dict[Role, Any] | None = None, **changes: Any
) -> Subject:
    """Build what the checks judge; `system` and `links` change facts of single nodes, None takes a node away."""
    system, links = system or {}, links or {}
    settings = Settings.model_validate({**SETTINGS, **changes.pop("settings", {})})
    recipe = load_recipe("tensorfold-1017")
    if "recipe" in changes:
        recipe = changes.pop("recipe")(recipe)
    return Subject(
        settings,
        recipe,
        {role: make_system(role, **system.get(role, {})) for role in ROLES if system.get(role, {}) is not None},
        {role: make_link(role, **links.get(role, {})) for role in ROLES if links.get(role, {}) is not None},
        **changes,
    )
