"""The engine image on the head: built from pinned sources, or pulled, and proved before it gets its name."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkserve import state_file
from sparkserve.cluster import Node, state_dir
from sparkserve.errors import SparkserveError
from sparkserve.git import export_commit, fetch_commit
from sparkserve.hosts import Host
from sparkserve.image_facts import ImageFacts, check_room, gather, look
from sparkserve.lock import LockedImage
from sparkserve.plan import Work
from sparkserve.recipe import Image
from sparkserve.settings import process_environment
from sparkserve.streams import follow
from sparkserve.system_text import parse_meminfo

# One job of a CUDA compiler takes up to about this much memory.
_BYTES_PER_JOB = 4 * 2**30
_HELP_SECONDS = 300.0
_STEP_LINE = re.compile(r"#\d+ \[.+|Step \d+/\d+ : .+")
_LAYER_LINE = re.compile(r"([0-9a-f]{12}): (Pulling fs layer|Already exists|Pull complete)")


@dataclass(frozen=True)
class BuildFile:
    """One file of the build context."""

    content: bytes
    executable: bool


@dataclass(frozen=True)
class Order:
    """All that decides an engine image, under the name that is made of it."""

    tag: str
    image: Image
    locked: LockedImage
    files: Mapping[str, BuildFile]
    labels: Mapping[str, str]
    flags: tuple[str, ...]
    options: tuple[str, ...] = ()


def build(node: Node, order: Order, work: Work) -> str:
    """Build the image, prove it, and only then give it its name."""
    check_room(node, gather(node, order.tag), order.image.expected_bytes, "build the image")
    work.note(f"fetching the engine at {order.locked.engine_commit[:12]}")
    locked = order.locked
    sources = f"{node.cache_dir}/sources"
    place = fetch_commit(node.host, locked.engine_repository, locked.engine_commit, sources, work.check)
    candidate = f"{order.tag}-candidate"
    with _context(node, order) as directory:
        export_commit(node.host, place, locked.engine_commit, directory, work.check)
        _run_build(node, order, candidate, directory, work)
    try:
        return prove(node, order, candidate, work)
    finally:
        node.host.run(["docker", "image", "rm", "--no-prune", candidate], check=False)


def pull(node: Node, order: Order, work: Work) -> str:
    """Pull the finished image unless it is there, prove it, and only then give it our name."""
    reference = order.locked.reference
    if look(node, reference) is None or order.options:
        check_room(node, gather(node, order.tag), order.image.expected_bytes, "pull the image")
        layers: dict[str, str] = {}

        def on_line(line: str) -> None:
            if match := _LAYER_LINE.match(line):
                layers[match[1]] = match[2]
                ready = sum(state != "Pulling fs layer" for state in layers.values())
                work.note(f"{ready} of {len(layers)} layers")

        result = follow(node.host, ["docker", "pull", reference], work.check, on_line)
        if result.exit_code != 0:
            message = f"cannot pull {reference}"
            raise SparkserveError("pull_failed", message, "docker pull tells more", node.role, result.text[-4000:])
    return prove(node, order, reference, work)


@contextlib.contextmanager
def _context(node: Node, order: Order) -> Iterator[str]:
    """Lay out the recipe's build files in a directory that is gone afterwards."""
    above = f"{node.cache_dir}/builds"
    directory = f"{above}/{order.tag.rpartition(':')[2]}"
    # Only one run writes at a time, so what lies here was left by one that was killed.
    node.host.run(["rm", "-rf", "--", above])
    try:
        paths = {directory, *(f"{directory}/{name}".rpartition("/")[0] for name in order.files)}
        node.session.ask("mkdir", paths=sorted(paths))
        for name, file in order.files.items():
            node.host.write(f"{directory}/{name}", file.content, 0o755 if file.executable else 0o644)
        yield directory
    finally:
        node.host.run(["rm", "-rf", "--", above])


def _run_build(node: Node, order: Order, name: str, directory: str, work: Work) -> None:
    arguments = {"BASE": order.locked.base, "MAX_JOBS": str(_jobs(node)), **order.image.build_arguments}
    argv = [*_builder(node.host), *order.options, "--file", f"{directory}/{order.image.dockerfile}", "--tag", name]
    for key, value in order.labels.items():
        argv += ["--label", f"{key}={value}"]
    for key, value in arguments.items():
        argv += ["--build-arg", f"{key}={value}"]
    path = log_path(order.tag)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("w", encoding="utf-8") as log:

        def on_line(line: str) -> None:
            log.write(line + "\n")
            log.flush()
            if _STEP_LINE.fullmatch(line):
                work.note(re.sub(r"^#\d+ ", "", line))

        result = follow(node.host, [*argv, directory], work.check, on_line)
    if result.exit_code != 0:
        tail = "\n".join([line for line in result.text.splitlines() if line][-30:])
        hint = f"the whole log: {path}"
        raise SparkserveError("build_failed", "docker build failed", hint, node.role, tail)


def log_path(tag: str) -> Path:
    """Give the place of a build's log."""
    return state_dir(process_environment()) / "logs" / f"build-{tag.rpartition(':')[2]}.log"


def _builder(host: Host) -> list[str]:
    """Choose BuildKit where the machine has it: as a plugin, or inside an older command line."""
    has_plugin = host.run(["docker", "buildx", "version"], check=False).exit_code == 0
    client = host.run(["docker", "version", "--format", "{{.Client.Version}}"], check=False).text
    major = re.match(r"\d+", client)
    if has_plugin or (major and int(major[0]) < 23):
        # Attestations would make an index of the image, which `docker save` cannot carry whole.
        settings = ["DOCKER_BUILDKIT=1", "BUILDX_NO_DEFAULT_ATTESTATIONS=1"]
        return ["env", *settings, "docker", "build", "--progress", "plain"]
    return ["env", "DOCKER_BUILDKIT=0", "docker", "build"]


def _jobs(node: Node) -> int:
    """Cap compile jobs by the memory that is available now."""
    text = node.session.ask("facts", files=["/proc/meminfo"])["files"]["/proc/meminfo"] or ""
    available = parse_meminfo(text).get("MemAvailable", 0)
    return max(1, min(int(node.identity["cpus"]), available // _BYTES_PER_JOB))


def prove(node: Node, order: Order, name: str, work: Work) -> str:
    """Prove labels, architecture, entry point and flags of an image; then name it, and look that the name is there."""
    found = look(node, name)
    if found is None:
        raise SparkserveError("image_missing", f"Docker made no image {name}", node=node.role)
    _check_content(node, order, found)
    flags = _check_flags(node, order, name, work)
    keep_known_flags(found.id, order.image, order.flags)
    node.host.run(["docker", "tag", name, order.tag])
    named = look(node, order.tag)
    if named is None or named.layers != found.layers:
        raise SparkserveError("image_missing", f"the name {order.tag} did not stay", node=node.role)
    return f"{len(named.layers)} layers, {named.size / 1e9:.2f} GB, {named.architecture}, {flags}"


def _check_content(node: Node, order: Order, found: ImageFacts) -> None:
    differing = [key for key, value in order.labels.items() if found.labels.get(key) != value]
    if differing:
        message = f"the image was built, but its label {differing[0]} is {found.labels.get(differing[0])!r}"
        raise SparkserveError("image_labels", message, "a Dockerfile must not set sparkserve's labels", node.role)
    wanted = order.image.architecture
    if wanted not in ("any", found.architecture):
        message = f"the image is for {found.architecture}; needed: {wanted}"
        raise SparkserveError("image_architecture", message, "look at `image` in the recipe", node.role)


def _check_flags(node: Node, order: Order, name: str, work: Work) -> str:
    """Start the entry point without network or weights, and ask it for its flags."""
    if not order.image.flags_help:
        return "flags not asked for"
    work.note("asking the engine for its flags")
    container = f"sparkserve-flags-{os.getpid()}"
    entry, *first = order.image.entrypoint
    limits = ["--rm", "--init", "--network", "none", "--name", container]
    argv = ["docker", "run", *limits, "--entrypoint", entry, name, *first, *order.image.flags_help]
    said: list[str] = []  # all of it: vLLM's help has a thousand lines
    try:
        answer = follow(node.host, argv, _with_deadline(work.check, node.role), said.append)
    finally:
        node.host.run(["docker", "rm", "--force", container], check=False)
    if answer.exit_code != 0:
        shown = " ".join([*order.image.entrypoint, *order.image.flags_help])
        message = f"the engine in the image does not start: `{shown}` ends with {answer.exit_code}"
        hint = "look at `entrypoint` and `flags_help` of the recipe, and at its Dockerfile"
        raise SparkserveError("image_entrypoint", message, hint, node.role, answer.text[-4000:])
    text = "\n".join(said)
    unknown = [flag for flag in order.flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)]
    if unknown:
        message = f"the engine in the image does not know {', '.join(unknown)}"
        hint = f"it is {order.locked.engine_repository or name}; take the flag out of the recipe, or use another engine"
        raise SparkserveError("image_flags", message, hint, node.role, answer.text[-4000:])
    return f"starts and knows all {len(order.flags)} flags"


def known_flags(image_id: str, image: Image) -> frozenset[str]:
    """Give the flags that the engine in an image was asked for, in the way in which this recipe asks."""
    return frozenset(state_file.read(_flags_file()).get(_flags_key(image_id, image), ()))


def keep_known_flags(image_id: str, image: Image, flags: Iterable[str]) -> None:
    """Remember that the engine in an image knows these flags, too."""
    known = known_flags(image_id, image) | set(flags)
    state_file.write(_flags_file(), state_file.read(_flags_file()) | {_flags_key(image_id, image): sorted(known)})


def _flags_file() -> Path:
    return state_dir(process_environment()) / "image-flags.json"


def _flags_key(image_id: str, image: Image) -> str:
    return " ".join([image_id, *image.entrypoint, *image.flags_help])


def _with_deadline(check: Callable[[], None], role: str) -> Callable[[], None]:
    end = time.monotonic() + _HELP_SECONDS

    def checked() -> None:
        check()
        if time.monotonic() > end:
            message = f"the engine in the image tells no flags within {_HELP_SECONDS:g} s"
            raise SparkserveError("image_entrypoint", message, "look at `flags_help` of the recipe", role)

    return checked
