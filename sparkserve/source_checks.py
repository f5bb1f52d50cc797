"""What a rank will be given is looked at before there is a container: is it there, can it be opened and run inside."""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from sparkserve.checks import Check, raise_failures, verdict
from sparkserve.cluster import Cluster, Node, Role
from sparkserve.container import RANK_LABEL, READER_LABEL, ContainerSpec
from sparkserve.docker_form import reader_argv
from sparkserve.engine_facts import list_containers
from sparkserve.engine_watch import Launch
from sparkserve.errors import SparkserveError
from sparkserve.hosts import CommandResult

_SECONDS = 10.0  # enough for an image that was not read for long
_REFUSED = 125  # by Docker; a rank would be, too
_READERS = f"?all=1&filters=%7B%22label%22%3A%5B%22{READER_LABEL}%22%5D%7D"
_NEEDED = "every file and device that the container is given, open to its user, and its entry point"
_NOT_FOUND = "entrypoint "


def check_sources(node: Node, spec: ContainerSpec) -> Check:
    """Check that every file and device is there, then that a container as the rank's own will be can open the files.

    Its entry point is looked for there, too: nobody ran that of an image which was only pulled or taken over.
    """
    paths = [*(mount.source for mount in spec.mounts if mount.read_only or mount.owners), *spec.devices]
    files = [{"path": path, "algorithm": "sha256"} for path in paths]
    found = node.session.ask("look", store=node.proofs_file, files=files)
    if missing := [path for path in paths if found[path]["kind"] == "missing"]:
        return Check("source", node.role, "fail", f"not there: {', '.join(missing)}", _NEEDED)
    try:
        answer = node.host.run(reader_argv(spec), timeout=_SECONDS, check=False)
    except SparkserveError as error:
        if error.code != "command_timeout":
            raise
        answer = CommandResult((), -1, b"", f"no end within {_SECONDS:g} s".encode())
    finally:
        remove_readers(node)
    return _judge(node.role, spec, answer)


def _judge(role: Role, spec: ContainerSpec, answer: CommandResult) -> Check:
    """Judge what a reader left: the files that it names are closed; one that could not run proves nothing."""
    said = next((line for line in answer.error_text.splitlines() if not line.startswith("WARNING")), "")
    lines = answer.text.splitlines()
    closed = [line for line in lines if not line.startswith(_NOT_FOUND)]
    no_program = any(_lacks_program(spec, line) for line in lines if line not in closed)
    good = not (closed or no_program) if answer.exit_code == 0 else False if answer.exit_code == _REFUSED else None
    observed, hint = "all are there and open", ""
    if answer.exit_code != 0:
        why = said or f"exit code {answer.exit_code}"
        observed, hint = (
            f"no container like {spec.name} opens its files: {why}",
            "an image with `sh` can be looked into",
        )
    elif no_program:
        observed = f"rank {spec.labels[RANK_LABEL]} has no program {spec.entrypoint[0]} in {spec.image}"
        hint = "look at `entrypoint` of the recipe, and at its image"
    elif closed:
        path = next(mount.source for mount in spec.mounts if mount.target == closed[0])
        more, reason = f" and {len(closed) - 1} more files" if closed[1:] else "", said.rpartition(": ")[2]
        observed = f"rank {spec.labels[RANK_LABEL]} cannot read {path}{more} from inside its container: {reason}"
        hint = f"`ls -l {shlex.quote(path)}`: the container's user must be able to read it, and enter each folder above"
    return Check("source", role, verdict(good=good), observed, _NEEDED, hint)


def _lacks_program(spec: ContainerSpec, line: str) -> bool:
    """Judge where a reader looked in vain; what the rank can write is mounted for the rank alone, and may hold it."""
    directory, *path = line.removeprefix(_NOT_FOUND).split(":")
    program = spec.entrypoint[0]
    places = [PurePosixPath(directory, program)] if "/" in program else [PurePosixPath(one, program) for one in path]
    own = [mount.target for mount in spec.mounts if not mount.read_only]
    return not any(place.is_relative_to(target) for place in places for target in own)


def require_sources(cluster: Cluster, launch: Launch) -> str:
    """Check them before a start's first change where the preflight could not, and tell what could not be seen."""
    if not launch.needs or "source" in launch.skipped_checks:
        return ""
    found = cluster.on_both(lambda node: check_sources(node, launch.specs[node.role])).values()
    raise_failures(found)
    return "".join(f"; {check.node}: {check.observed}" for check in found if check.verdict != "ok")


def remove_readers(node: Node) -> None:
    """Remove what opened files and did not go by itself, of this start or of one that was killed."""
    if found := [row["Id"] for row in list_containers(node, _READERS)[1]]:
        # One that goes by itself in this moment is no failure; one that stays is met by the next start.
        node.host.run(["docker", "rm", "--force", *found], check=False)
