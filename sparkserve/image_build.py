"""The engine image on the head: built from pinned sources, or pulled, and proved before it gets its name."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from sparkserve import state_file
from sparkserve.cluster import Deployment, Node
from sparkserve.errors import SparkserveError
from sparkserve.git import export_commit, fetch_commit
from sparkserve.hosts import Host
from sparkserve.image_facts import (
    BuildFile,
    ImageFacts,
    Program,
    build_files,
    check_room,
    differing_labels,
    gather,
    labels_of,
    long_flags,
    look,
    tag_of,
)
from sparkserve.plan import Work
from sparkserve.recipe import Image
from sparkserve.settings import process_environment, state_dir
from sparkserve.streams import follow
from sparkserve.system_text import parse_meminfo

# One job of a CUDA compiler takes up to about this much memory.
_BYTES_PER_JOB = 4 * 2**30
_HELP_SECONDS = 300  # then timeout(1) ends with 124
_STEP_LINE = re.compile(r"#\d+ \[.+|Step \d+/\d+ : .+")
_LAYER_LINE = re.compile(r"([0-9a-f]{12}): (Pulling fs layer|Already exists|Pull complete)")


def build(deployment: Deployment, work: Work) -> str:
    """Build the image, prove it, and only then give it its name."""
    node, locked, tag = deployment.cluster.head, deployment.lock.image, tag_of(deployment.recipe, deployment.lock)
    check_room(node, gather(node, tag), deployment.recipe.image.expected_bytes, "build the image")
    candidate = f"{tag}-candidate"
    with _context(node, build_files(deployment.recipe), tag) as directory:
        if commit := locked.engine_commit:
            work.note(f"fetching the engine at {commit[:12]}")
            sources = f"{node.cache_dir}/sources"
            place = fetch_commit(node.host, locked.engine_repository, commit, sources, work.check)
            export_commit(node.host, place, commit, directory, work.check)
        _run_build(deployment, candidate, directory, work)
    try:
        return prove(deployment, candidate, work)
    finally:
        node.host.run(["docker", "image", "rm", "--no-prune", candidate], check=False)


def pull(deployment: Deployment, work: Work) -> str:
    """Pull the finished image unless it is there, prove it, and only then give it our name."""
    node, reference = deployment.cluster.head, deployment.lock.image.reference
    is_there = look(node, reference) is not None
    if not is_there and reference.startswith("sha256:"):
        message = f"the head has no image with the id {reference[:19]}…, and no registry gives one by its id"
        hint = "`docker images --no-trunc` shows those that are there; `docker load` brings one; or NAME@sha256:…"
        raise SparkserveError("image_missing", message, hint, node.role)
    if not is_there or deployment.build_options:
        facts = gather(node, tag_of(deployment.recipe, deployment.lock))
        check_room(node, facts, deployment.recipe.image.expected_bytes, "pull the image")
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
    return prove(deployment, reference, work)


@contextlib.contextmanager
def _context(node: Node, files: Mapping[str, BuildFile], tag: str) -> Iterator[str]:
    """Lay out the recipe's build files in a directory that is gone afterwards."""
    above = f"{node.cache_dir}/builds"
    directory = f"{above}/{tag.rpartition(':')[2]}"
    # Only one run writes at a time, so what lies here was left by one that was killed.
    node.host.run(["rm", "-rf", "--", above])
    try:
        paths = {directory, *(f"{directory}/{name}".rpartition("/")[0] for name in files)}
        node.session.ask("mkdir", paths=sorted(paths))
        for name, file in files.items():
            node.host.write(f"{directory}/{name}", file.content, 0o755 if file.executable else 0o644)
        yield directory
    finally:
        node.host.run(["rm", "-rf", "--", above])


def _run_build(deployment: Deployment, name: str, directory: str, work: Work) -> None:
    node, recipe, lock = deployment.cluster.head, deployment.recipe, deployment.lock
    arguments = {"BASE": lock.image.base, "MAX_JOBS": str(_jobs(node)), **recipe.image.build_arguments}
    argv = [*_builder(node.host), *deployment.build_options, "--file", f"{directory}/{recipe.image.dockerfile}"]
    argv += ["--tag", name]
    for key, value in labels_of(recipe, lock).items():
        argv += ["--label", f"{key}={value}"]
    for key, value in arguments.items():
        argv += ["--build-arg", f"{key}={value}"]
    path = log_path(tag_of(recipe, lock))
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


def prove(deployment: Deployment, name: str, work: Work) -> str:
    """Prove labels, architecture, entry point and flags of an image; then name it, and look that the name is there."""
    node, recipe, tag = deployment.cluster.head, deployment.recipe, tag_of(deployment.recipe, deployment.lock)
    found = look(node, name)
    if found is None:
        raise SparkserveError("image_missing", f"Docker made no image {name}", "sparkserve build --no-cache", node.role)
    _check_content(deployment, found)
    every = long_flags(recipe, deployment.settings.extra_args)
    for program, flags in every.items():
        _check_flags(deployment, name, program, flags, work)
        keep_known_flags(found.id, recipe.image, program, flags)
    count = len({flag for flags in every.values() for flag in flags})
    asked = f"starts and knows all {count} flags" if every else "flags not asked for"
    node.host.run(["docker", "tag", name, tag])
    named = look(node, tag)
    if named is None or named.layers != found.layers:
        raise SparkserveError("image_missing", f"the name {tag} did not stay", "`sparkserve build`", node.role)
    return f"{len(named.layers)} layers, {named.size / 1e9:.2f} GB, {named.architecture}, {asked}"


def _check_content(deployment: Deployment, found: ImageFacts) -> None:
    if differing := differing_labels(deployment, found):
        message = f"the image was built, but its label {differing[0]} is {found.labels.get(differing[0])!r}"
        raise SparkserveError("image_labels", message, "a Dockerfile must not set sparkserve's labels", "head")
    wanted = deployment.recipe.image.architecture
    if wanted not in ("any", found.architecture):
        message = f"the image is for {found.architecture}; needed: {wanted}"
        raise SparkserveError("image_architecture", message, "look at `image` in the recipe", "head")


def _check_flags(deployment: Deployment, name: str, program: Program, flags: Sequence[str], work: Work) -> None:
    """Start a program without network or weights, as the first to go where memory is short, and ask for its flags."""
    work.note("asking the engine for its flags")
    node, recipe, repository = deployment.cluster.head, deployment.recipe, deployment.lock.image.engine_repository
    container = f"sparkserve-flags-{os.getpid()}"
    entry, *first = program
    limits = ["--rm", "--init", "--network", "none", "--oom-score-adj", "1000", "--name", container]
    limits += ["--gpus", "all"] if recipe.container.gpus else []  # some engines load CUDA before they print their help
    argv = ["docker", "run", *limits, "--entrypoint", entry, name, *first, *recipe.image.flags_help]
    said: list[str] = []  # all of it: vLLM's help has a thousand lines
    try:
        answer = follow(node.host, ["timeout", "--foreground", str(_HELP_SECONDS), *argv], work.check, said.append)
    finally:
        node.host.run(["docker", "rm", "--force", container], check=False)
    if answer.exit_code != 0:
        shown = " ".join([*program, *recipe.image.flags_help])
        how = f"gives no end within {_HELP_SECONDS} s" if answer.exit_code == 124 else f"ends with {answer.exit_code}"
        message = f"the engine in the image does not start: `{shown}` {how}"
        hint = "look at `entrypoint` and `flags_help` of the recipe, and at its Dockerfile"
        raise SparkserveError("image_entrypoint", message, hint, node.role, answer.text[-4000:])
    text = "\n".join(said)
    unknown = [flag for flag in flags if not re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", text)]
    if unknown:
        message = f"the engine in the image does not know {', '.join(unknown)}"
        hint = f"it is {repository or name}; look at `launch` of the recipe, SPARKSERVE_EXTRA_ARGS"
        raise SparkserveError("image_flags", message, hint, node.role, answer.text[-4000:])


def known_flags(image_id: str, image: Image, program: Program) -> frozenset[str]:
    """Give the flags that a program of an image was asked for, in the way in which this recipe asks."""
    return frozenset(state_file.read(_flags_file()).get(_flags_key(image_id, image, program), ()))


def keep_known_flags(image_id: str, image: Image, program: Program, flags: Iterable[str]) -> None:
    """Remember that a program of an image knows these flags, too; where a disk takes nothing, it is asked again."""
    key, known = _flags_key(image_id, image, program), known_flags(image_id, image, program) | set(flags)
    with contextlib.suppress(OSError):
        state_file.write(_flags_file(), state_file.read(_flags_file()) | {key: sorted(known)})


def _flags_file() -> Path:
    return state_dir(process_environment()) / "image-flags.json"


def _flags_key(image_id: str, image: Image, program: Program) -> str:
    return " ".join([image_id, *program, *image.flags_help])
