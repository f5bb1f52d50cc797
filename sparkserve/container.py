"""What one rank's container is, as data, built by one pure function for both ranks."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from sparkserve.cluster import ROLES, Deployment, Node, Role
from sparkserve.errors import SparkserveError, usage_error
from sparkserve.parameters import (
    check_exposure,
    check_extra_args,
    check_json,
    decide_parameters,
    decide_ports,
    launcher_flags,
)
from sparkserve.placeholders import PLACEHOLDERS, render

OWNER_LABEL = "sparkserve.owner"
OWNER = "sparkserve"
RANK_LABEL = "sparkserve.rank"
SPEC_LABEL = "sparkserve.spec"
RUN_LABEL = "sparkserve.run"
RECIPE_LABEL = "sparkserve.recipe"
WEIGHTS_LABEL = "sparkserve.weights"
# Of what opens files before there is a rank. It is no rank, and has no owner's label by which one would be counted.
READER_LABEL = "sparkserve.reader"
_SECRET = re.compile(r"<secret\.([A-Za-z_][A-Za-z0-9_]*)>")
# What no recipe decides. It belongs to the digest, so that a release that changes it replaces what runs.
FIXED_OPTIONS: Mapping[str, Any] = {
    "network_mode": "host",
    "init": True,
    "restart_policy": {"Name": "no", "MaximumRetryCount": 0},
    "security_opt": ["no-new-privileges"],
    "log_config": {"Type": "json-file", "Config": {"max-size": "50m", "max-file": "3"}},
}


@dataclass(frozen=True)
class LinkPlace:
    """What a rank must know of its node's end of the cable; empty or None while it is not known."""

    address: str = ""
    interface: str = ""
    hcas: tuple[str, ...] = ()
    gid_index: int | None = None


def is_ours(labels: Mapping[str, str] | None) -> bool:
    """Whether a container with these labels is one of ours."""
    return (labels or {}).get(OWNER_LABEL) == OWNER


@dataclass(frozen=True)
class BindMount:
    """A file or directory of the node inside the container."""

    source: str
    target: str
    read_only: bool = True
    owners: bool = False  # must be there, and is never made


@dataclass(frozen=True)
class ContainerSpec:
    """Everything that decides one rank's container; `unresolved` names facts that were not known."""

    name: str
    image: str
    entrypoint: tuple[str, ...]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    mounts: tuple[BindMount, ...]
    devices: tuple[str, ...]
    capabilities: tuple[str, ...]
    ulimits: Mapping[str, int]
    ipc: str
    shm_bytes: int
    gpus: bool
    oom_score_adj: int
    pids_limit: int | None
    stop_seconds: int
    user: str = ""
    directory: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    unresolved: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Digest of what was wanted, as the label carries it."""
        return self.labels[SPEC_LABEL]

    @property
    def run(self) -> str:
        """The run to which the container belongs; empty before it has one."""
        return self.labels.get(RUN_LABEL, "")

    def of_run(self, run: str) -> ContainerSpec:
        """Give the same container as part of one run."""
        return replace(self, labels={**self.labels, RUN_LABEL: run})


def container_name(rank: int) -> str:
    """Give the one name that a rank's container has."""
    return f"sparkserve-rank{rank}"


def build_spec(
    deployment: Deployment, rank: int, links: Mapping[Role, LinkPlace], files: Mapping[str, str], image: str
) -> ContainerSpec:
    """Build the container of a rank from the settings, the recipe, the lock and the places of the rank's own node.

    `files` are single files beside the weights: path in the container to path on the node.
    """
    check_exposure(deployment.settings, deployment.recipe)
    _check_extra_args(deployment)
    values = _values(deployment, rank, links, image)
    mounts = _mounts(deployment, rank, files)
    spec = _fill(deployment, rank, values, mounts)
    check_json(spec.argv)
    # The GID index moves by itself when a link comes up again: it must not make a running pair look outdated.
    steady = _fill(deployment, rank, {**values, "link.gid_index": "<link.gid_index>"}, mounts)
    labels = {
        OWNER_LABEL: OWNER,
        RANK_LABEL: str(rank),
        RECIPE_LABEL: deployment.recipe.name,
        WEIGHTS_LABEL: deployment.lock.weights_id,
        SPEC_LABEL: _digest(steady),
    }
    return replace(spec, labels=labels)


def _check_extra_args(deployment: Deployment) -> None:
    recipe, extra = deployment.recipe, deployment.settings.extra_args
    if extra and recipe.runs_script(0):
        message = (
            f"SPARKSERVE_EXTRA_ARGS: {extra[0]} would be an argument of recipe {recipe.name}'s shell, not its engine"
        )
        raise usage_error(
            "extra_args_shell", message, "write it into the script of a recipe of yours, and name its path"
        )
    check_extra_args(extra, launcher_flags(recipe))


def _digest(spec: ContainerSpec) -> str:
    data = asdict(spec)
    for name in ("labels", "unresolved"):
        del data[name]
    text = json.dumps({**data, **FIXED_OPTIONS}, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _values(deployment: Deployment, rank: int, links: Mapping[Role, LinkPlace], image: str) -> dict[str, str]:
    settings, recipe = deployment.settings, deployment.recipe
    parameters, ports = decide_parameters(settings, recipe), decide_ports(settings, recipe)
    role, link = ROLES[rank], links[ROLES[rank]]
    # Engines want as many devices on one rank as on the other; the first is the link address's own.
    halves = min(len(one.hcas) for one in links.values()) or None
    known: dict[str, object] = {
        "rank": rank,
        "head.link.address": links["head"].address or "<head.link.address>",
        "worker.link.address": links["worker"].address or "<worker.link.address>",
        "link.address": link.address or f"<{role}.link.address>",
        "link.interface": link.interface or f"<{role}.link.interface>",
        "link.hcas": ",".join(link.hcas[:halves]) or f"<{role}.link.hcas>",
        "link.hca": "".join(link.hcas[:1]) or f"<{role}.link.hca>",
        "link.gid_index": f"<{role}.link.gid_index>" if link.gid_index is None else link.gid_index,
        **{f"ports.{name}": port for name, port in ports.named.items()},
        "api_host": settings.api_host,
        "cache": deployment.cluster.node(role).cache_dir,
        "weights.id": deployment.lock.weights_id,
        "image.id": image_id(image),
        **{name: getattr(parameters, name) for name in ("model_name", "context", "requests", "drafts")},
        "kv_bytes": recipe.memory.kv_bytes,
        "dollar": "$",
        "image": image,
    }
    return {name: str(value) for name, value in known.items() if value is not None}


def image_id(image: str) -> str:
    """Give what keeps the caches of one image apart from those of others."""
    _, _, digest = image.partition("@sha256:")
    return (digest or image.rpartition(":")[2])[:12]


def _fill(deployment: Deployment, rank: int, values: Mapping[str, str], mounts: tuple[BindMount, ...]) -> ContainerSpec:
    recipe, launch, box = deployment.recipe, deployment.recipe.launch, deployment.recipe.container
    parameters = decide_parameters(deployment.settings, recipe)
    decided = {**dict(parameters), "api_key": deployment.settings.api_key_file}
    words = [render(word, values) for word in launch.words_of(rank, decided)]
    own_env = {**launch.env, **(launch.worker_env if rank else launch.head_env)}
    if launch.api_key_env and deployment.settings.api_key_file and rank == 0:
        own_env[launch.api_key_env] = "${secret.api_key}"
    env = {name: render(value, values) for name, value in own_env.items()}
    extra = () if rank and launch.worker_entrypoint else deployment.settings.extra_args
    places = [
        BindMount(render(m.source, values), m.target, read_only=not m.writable, owners=m.must_exist)
        for m in box.mounts
        if rank in m.ranks
    ]
    spec = ContainerSpec(
        name=container_name(rank),
        image=values["image"],
        entrypoint=recipe.program(rank),
        argv=(*words, *extra),
        env=env,
        mounts=(*mounts, *places),
        devices=box.devices,
        capabilities=box.capabilities,
        ulimits=box.ulimits,
        ipc=box.ipc,
        shm_bytes=box.shm_bytes if box.ipc == "private" else 0,
        gpus=box.gpus,
        oom_score_adj=box.oom_score_adj,
        pids_limit=box.pids_limit,
        stop_seconds=box.stop_seconds,
        user=box.user,
        directory=box.directory,
    )
    return replace(spec, unresolved=_unresolved(spec))


def _unresolved(spec: ContainerSpec) -> tuple[str, ...]:
    """List the facts that this rank would need and nobody could say."""
    texts = "\n".join([*spec.argv, *spec.env.values(), *(mount.source for mount in spec.mounts)])
    found = {match[1] for match in re.finditer(r"<([a-z_.]+)>", texts)}
    return tuple(sorted(name for name in found if {name, name.partition(".")[2]} & PLACEHOLDERS.keys()))


def _mounts(deployment: Deployment, rank: int, files: Mapping[str, str]) -> tuple[BindMount, ...]:
    recipe, node = deployment.recipe, deployment.cluster.node(ROLES[rank])
    mounts = [*_weights_mounts(deployment, node), *(BindMount(source, target) for target, source in files.items())]
    if deployment.settings.api_key_file is not None and recipe.launch.api_key_mount and rank == 0:
        key_file = deployment.settings.api_key_file.expanduser()
        mounts.append(BindMount(str(Path.cwd() / key_file), recipe.launch.api_key_mount))
    # The template may stand where the weights have one of their own: the later mount of a target holds.
    return tuple({mount.target: mount for mount in mounts}.values())


def _weights_mounts(deployment: Deployment, node: Node) -> list[BindMount]:
    targets = {weights.name: weights.mount for weights in deployment.recipe.weights}
    return [
        BindMount(node.place(manifest, file), f"{targets[manifest.name]}/{file.path}")
        for manifest in deployment.lock.weights
        if targets[manifest.name]
        for file in manifest.files
    ]


def with_secrets(spec: ContainerSpec, values: Mapping[str, SecretStr]) -> ContainerSpec:
    """Put secrets in, which a spec otherwise only names; just before its container is made, and to be kept nowhere."""

    def put(text: str) -> str:
        return _SECRET.sub(lambda match: values[match[1]].get_secret_value(), text)

    texts = "\n".join([*spec.argv, *spec.env.values()])
    missing = sorted({match[1] for match in _SECRET.finditer(texts)} - values.keys())
    if missing:
        message = f"{spec.name} needs secrets that nobody knows: {', '.join(missing)}"
        hint = "SPARKSERVE_SECRETS_FILE should name a file (mode 0600) of NAME=value lines; `api_key` is the API key's"
        raise usage_error("secret_unset", message, hint)
    env = {name: put(value) for name, value in spec.env.items()}
    return replace(spec, argv=tuple(map(put, spec.argv)), env=env)


def check_resolved(spec: ContainerSpec) -> None:
    """Refuse to start a container in which a fact of its node is missing."""
    if spec.unresolved:
        message = f"{spec.name} cannot be started: nobody knows {', '.join(spec.unresolved)}"
        hint = "`sparkserve plan --live` shows what is known; the addresses in .env must be those of the cable"
        raise SparkserveError("spec_unresolved", message, hint, exit_code=3)
