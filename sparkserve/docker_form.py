"""One container spec, rendered for people (`docker run …`) and for docker-py; both make the same container."""

from __future__ import annotations

import csv
import io
import os
from dataclasses import replace
from typing import Any

from sparkserve.container import FIXED_OPTIONS, READER_LABEL, BindMount, ContainerSpec

_FIXED_FLAGS = (
    "--network=host",
    "--init",
    "--restart=no",
    "--security-opt=no-new-privileges",
    "--log-driver=json-file",
    "--log-opt=max-size=50m",
    "--log-opt=max-file=3",
)
_READER_FLAGS = ("--rm", "--pull=never", "--network=none", "--log-driver=none", "--security-opt=no-new-privileges")
# A link is taken for a program: it may lead to what only the rank is given.
_LOOK_INSIDE = """\
runs() { [ -L "$1" ] || { [ -f "$1" ] && [ -x "$1" ]; }; }
found() {
    case $1 in */*) runs "$1"; return;; esac
    IFS=:
    for directory in $PATH; do runs "${directory:-.}/$1" && return; done
    return 1
}
found "$0" || echo "entrypoint $PWD:$PATH"
for file; do true < "$file" || echo "$file"; done"""


def docker_run_argv(spec: ContainerSpec) -> list[str]:
    """Render the `docker run` command that makes the same container, for people."""
    return ["docker", "run", "--detach", f"--name={spec.name}", *_FIXED_FLAGS, *_words(spec)]


def reader_argv(spec: ContainerSpec) -> list[str]:
    """Render the command that names each file which a rank could not open: same image, user, rights and mounts.

    Where it finds no entry point, it tells in which directory and along which path it looked. What it makes goes with
    its end, also when nobody is left to wait for that.
    """
    mounts = tuple(mount for mount in spec.mounts if mount.read_only)
    reader = replace(
        spec,
        entrypoint=("sh",),
        argv=("-c", _LOOK_INSIDE, spec.entrypoint[0], *(mount.target for mount in mounts)),
        # Where NVIDIA's runtime is the default, it brings the GPU in unasked.
        env={"NVIDIA_VISIBLE_DEVICES": "void"} | {name: spec.env[name] for name in ("PATH",) if name in spec.env},
        mounts=mounts,
        devices=(),
        gpus=False,
        labels={READER_LABEL: spec.name},
    )
    return ["docker", "run", f"--name=sparkserve-reader-{os.getpid()}", *_READER_FLAGS, *_words(reader)]


def _words(spec: ContainerSpec) -> list[str]:
    words = [f"--ipc={spec.ipc}"]
    words += [f"--shm-size={spec.shm_bytes}"] if spec.shm_bytes else []
    words += ["--gpus=all"] if spec.gpus else []
    words += [f"--device={device}" for device in spec.devices]
    words += [f"--cap-add={capability}" for capability in spec.capabilities]
    words += [f"--ulimit={name}={limit}:{limit}" for name, limit in spec.ulimits.items()]
    words += [f"--oom-score-adj={spec.oom_score_adj}"]
    words += [] if spec.pids_limit is None else [f"--pids-limit={spec.pids_limit}"]
    words += [f"--stop-timeout={spec.stop_seconds}"]
    words += [f"--user={spec.user}"] if spec.user else []
    words += [f"--workdir={spec.directory}"] if spec.directory else []
    words += [f"--label={name}={value}" for name, value in spec.labels.items()]
    words += [f"--env={name}={value}" for name, value in spec.env.items()]
    words += [f"--mount={_mount_field(mount)}" for mount in spec.mounts]
    return [*words, f"--entrypoint={spec.entrypoint[0]}", spec.image, *spec.entrypoint[1:], *spec.argv]


def _mount_field(mount: BindMount) -> str:
    fields = ["type=bind", f"source={mount.source}", f"target={mount.target}", *(["readonly"] * mount.read_only)]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()


def create_arguments(spec: ContainerSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    """Render for docker-py: arguments of `create_container`, and of `create_host_config`."""
    container = {
        "name": spec.name,
        "image": spec.image,
        # `docker run --entrypoint` takes one word, so the rest goes in front of the arguments here too
        "entrypoint": [spec.entrypoint[0]],
        "command": [*spec.entrypoint[1:], *spec.argv],
        "environment": dict(spec.env),
        "labels": dict(spec.labels),
        "stop_timeout": spec.stop_seconds,
        "user": spec.user or None,
        "working_dir": spec.directory or None,
        "detach": True,
        "use_config_proxy": False,
    }
    host = {
        **FIXED_OPTIONS,
        "ipc_mode": spec.ipc,
        "shm_size": spec.shm_bytes or None,
        "device_requests": [{"Count": -1, "Capabilities": [["gpu"]]}] if spec.gpus else None,
        "devices": list(spec.devices),
        "cap_add": list(spec.capabilities),
        "ulimits": [{"Name": name, "Soft": limit, "Hard": limit} for name, limit in spec.ulimits.items()],
        "oom_score_adj": spec.oom_score_adj,
        "pids_limit": spec.pids_limit,
        "mounts": [
            {"Type": "bind", "Source": m.source, "Target": m.target, "ReadOnly": m.read_only} for m in spec.mounts
        ],
    }
    return container, host
