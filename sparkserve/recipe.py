"""What to serve, as data: a recipe directory read into typed, checked models; nothing in a recipe can run code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from sparkserve.errors import usage_error
from sparkserve.manifest import REPOSITORY
from sparkserve.placeholders import PLACEHOLDER, PLACEHOLDERS, SECRET
from sparkserve.settings import nearest_name

CheckName = Literal["answer", "thinking", "tool", "schema", "needle"]
Rank = Literal[0, 1]
_SHELLS = {"sh", "bash", "dash", "zsh"}


def _check_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


Regex = Annotated[str, Field(min_length=1), AfterValidator(_check_regex)]
Word = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Port = Annotated[int, Field(ge=1, le=65535)]
Gib = Annotated[float, Field(ge=0, le=128)]  # a Spark has no more
Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(ge=1)]


class Data(BaseModel):
    """Base of all recipe tables: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Parameters(Data):
    """Values of the model that the owner may change in `.env`; absent means that this recipe has no such value."""

    model_name: str = Field(description="Name under which the API serves the model")
    context: int = Field(description="Longest context, in tokens", ge=1)
    requests: int | None = Field(None, description="Requests served side by side", ge=1)
    drafts: int | None = Field(None, description="Draft tokens per step", ge=0)
    thinking: bool | None = Field(None, description="Whether replies think by default")
    context_limit: int | None = Field(None, description="Most context that model or memory allow, in tokens", ge=1)
    drafts_limit: int | None = Field(None, description="Most draft tokens that the engine takes", ge=0)


class Ports(Data):
    """TCP ports; each must be free on both nodes, and no two may be the same."""

    api: Port = Field(description="Port of the API, on the head")
    master: Port = Field(description="Port on which the ranks meet, on the head's link address")
    more: dict[Word, Port] = Field(default_factory=dict, description="Further ports: `rpc = 50052` is `${ports.rpc}`")

    @property
    def named(self) -> dict[str, int]:
        """Every port by its name."""
        return {"api": self.api, "master": self.master, **self.more}

    def __str__(self) -> str:
        return ", ".join(f"{name} {port}" for name, port in self.named.items())


class Weights(Data):
    """Files of one hub repository at one commit, seen by the engine in one directory."""

    name: str = Field(description="Name within the recipe", pattern=r"^[a-z0-9-]+$")
    repository: str = Field(description="`org/name` on the hub", pattern=REPOSITORY)
    revision: str = Field(description="Commit (40 hex digits, or a prefix of at least 8), branch or tag")
    include: tuple[str, ...] = Field(("*",), description="Glob patterns of the wanted files")
    exclude: tuple[str, ...] = Field((), description="Glob patterns of files left out")
    files: int | None = Field(None, description="How many files must be found; a different count stops the lock", ge=1)
    mount: str = Field(description="Their directory in the container; empty: for `derived` only", pattern=r"^(/.+)?$")
    deny_sha256: tuple[str, ...] = Field((), description="Hashes that must not be served: same size, wrong content")
    expected_bytes: Bytes = Field(0, description="Rough size, in bytes, for a disk budget before the lock exists")


class Derived(Data):
    """One more file for the engine: a file of the recipe, or tensors that are read out of weights by their offsets."""

    name: str = Field(description="Name within the recipe; the file's own name on the nodes", pattern=r"^\w[\w.-]*$")
    mount: str = Field(description="Path in the container", pattern=r"^/.+$")
    file: str = Field("", description="File of the recipe that is put there as it is")
    weights: str = Field("", description="Name of the weights whose safetensors files hold the tensors")
    tensors: tuple[Regex, ...] = Field((), description="Regular expressions of tensor names; `LAYER` is each layer")
    layers: tuple[int, int] = Field((0, 0), description="First and last layer")
    dtype: str = Field("", description="Type that every tensor must have, such as BF16")
    expected_bytes: Bytes = Field(0, description="Rough size, in bytes, for the disk budget")

    @model_validator(mode="after")
    def _has_one_origin(self) -> Derived:
        if bool(self.file) == bool(self.weights and self.tensors and self.layers[0] <= self.layers[1]):
            raise ValueError("needs either `file`, or `weights` with `tensors` and `layers`")
        return self

    @property
    def count(self) -> int:
        """How many tensors are taken: each pattern names one in each layer."""
        return len(self.tensors) * (self.layers[1] - self.layers[0] + 1)


class ChatTemplate(Data):
    """A chat template fetched at a pinned hash; the prologue is put in front of it, its own lines stay as they are."""

    repository: str = Field(description="Hub repository that holds the template", pattern=REPOSITORY)
    revision: str = Field(description="Commit of that repository")
    path: str = Field("chat_template.jinja", description="Path of the template in the repository")
    git_sha1: str | None = Field(None, description="Git blob hash of the template", pattern=r"^[0-9a-f]{40}$")
    prologue: str = Field("", description="File of the recipe that is put in front, to set defaults")
    mount: str = Field(description="Path in the container where the engine reads the template", pattern=r"^/.+$")
    licence: str = Field("", description="Licence of the fetched template")


class Image(Data):
    """The engine image: built here on a pinned base, from an engine's source or without one, or pulled by digest."""

    dockerfile: str = Field("", description="Dockerfile of the recipe, `FROM ${BASE}`; empty: `reference` is used")
    base: str = Field("", description="Base image, `registry/name:tag`")
    base_digest: str = Field("", description="Digest of the base image", pattern=r"^(sha256:[0-9a-f]{64})?$")
    engine_repository: str = Field("", description="Git address of the engine: its files are in `engine/` of the build")
    engine_revision: str = Field("", description="Branch, tag or commit of the engine")
    build_arguments: dict[str, str] = Field(default_factory=dict, description="Further `--build-arg`s")
    reference: str = Field("", description="Finished image by digest, or its id on both nodes; else SPARKSERVE_IMAGE")
    reference_help: str = Field("", description="What to set SPARKSERVE_IMAGE to, where no public image is known")
    architecture: Literal["arm64", "amd64", "any"] = Field("arm64", description="Architecture the image must have")
    entrypoint: tuple[str, ...] = Field(description="The image's entry point, given to Docker as it is", min_length=1)
    flags_help: tuple[str, ...] = Field((), description="Arguments after the entry point that print every flag")
    expected_bytes: Bytes = Field(25_000_000_000, description="Rough size on disk, in bytes, for the disk budget")

    @model_validator(mode="after")
    def _has_a_source(self) -> Image:
        if self.dockerfile and not self.base:
            raise ValueError("a dockerfile needs `base`")
        if self.dockerfile and self.reference:
            raise ValueError("either `dockerfile` or `reference`: an empty text takes an inherited one away")
        if bool(self.engine_repository) != bool(self.engine_revision):
            raise ValueError("`engine_repository` and `engine_revision` go together")
        pinned = r"([^-@\s][^@\s]*@)?sha256:[0-9a-f]{64}"  # what begins with - would be an option of docker's
        if not self.dockerfile and self.reference and not re.fullmatch(pinned, self.reference):
            raise ValueError("`reference` should be pinned: name@sha256:<64 hex digits>")
        return self


class Mount(Data):
    """A directory of the node that the engine may write, such as its caches, or one with files of the owner's."""

    source: str = Field(description="Directory on the node; made if absent")
    target: str = Field(description="Path in the container", pattern=r"^/.+$")
    writable: bool = Field(default=True, description="Whether the engine may write there")
    must_exist: bool = Field(default=False, description="Whether it is the owner's: never made, it must be there")
    ranks: tuple[Rank, ...] = Field((0, 1), description="Ranks that get it")


class Container(Data):
    """Options of both ranks' containers; the network is the host's, and the container is never privileged."""

    gpus: bool = Field(default=True, description="Give the container all GPUs")
    ipc: Literal["host", "private"] = Field("private", description="Shared memory with the host or its own")
    shm_bytes: Bytes = Field(2_147_483_648, description="Size of /dev/shm, in bytes, where ipc is private")
    devices: tuple[str, ...] = Field(("/dev/infiniband",), description="Devices of the host")
    capabilities: tuple[str, ...] = Field(("IPC_LOCK",), description="Linux capabilities to add")
    ulimits: dict[str, int] = Field(default_factory=lambda: {"memlock": -1}, description="Limits; -1 is unlimited")
    oom_score_adj: int = Field(1000, description="The kernel ends the engine before anything else", ge=-1000, le=1000)
    pids_limit: int | None = Field(None, description="Most processes in the container", ge=1)
    stop_seconds: Seconds = Field(90, description="Time between SIGTERM and SIGKILL")
    user: str = Field("", description="User of the engine's process; empty: the image's")
    directory: str = Field("", description="Working directory; empty: the image's")
    mounts: tuple[Mount, ...] = Field((), description="Directories that survive the container")

    @model_validator(mode="after")
    def _has_its_own_memory(self) -> Container:
        if self.ipc == "host" and self.shm_bytes and "shm_bytes" in self.model_fields_set:
            raise ValueError('`shm_bytes` has no effect beside `ipc = "host"`; 0 takes an inherited one away')
        return self


class Switch(Data):
    """Arguments that depend on one parameter."""

    parameter: Literal["thinking", "drafts", "requests", "api_key"] = Field(description="Name of the parameter")
    on: tuple[str, ...] = Field((), description="Arguments when it is true, set, or more than 0")
    off: tuple[str, ...] = Field((), description="Arguments when it is false, absent or 0")
    ranks: tuple[Rank, ...] = Field((0, 1), description="Ranks that get them")


class Launch(Data):
    """argv and environment; `${…}` names the value of the rank's own node."""

    argv: tuple[str, ...] = Field(description="Arguments of both ranks")
    more_argv: tuple[str, ...] = Field((), description="Further arguments of both ranks, for recipes that extend one")
    head_argv: tuple[str, ...] = Field((), description="Further arguments of rank 0")
    worker_argv: tuple[str, ...] = Field((), description="Further arguments of rank 1")
    worker_entrypoint: tuple[str, ...] = Field((), description="Another program of rank 1, with `worker_argv` alone")
    owned: tuple[str, ...] = Field((), description="Flags that no extra argument may set: other spellings of ours")
    switches: tuple[Switch, ...] = Field((), description="Arguments that depend on a parameter")
    env: dict[str, str] = Field(default_factory=dict, description="Environment of both ranks")
    head_env: dict[str, str] = Field(default_factory=dict, description="Further environment of rank 0")
    worker_env: dict[str, str] = Field(default_factory=dict, description="Further environment of rank 1")
    api_key_mount: str = Field("", description="Path in rank 0's container of the API key file")
    api_key_env: str = Field("", description="Variable of rank 0 that holds the API key, set only where there is one")

    def words_of(self, rank: int, parameters: Mapping[str, object] | None = None) -> tuple[str, ...]:
        """Give the arguments of a rank with these parameters, or all that it may get."""
        own = self.worker_argv if rank else self.head_argv
        if rank and self.worker_entrypoint:
            return own
        words = [*self.argv, *self.more_argv, *own]
        for switch in self.switches:
            if rank in switch.ranks:
                is_on = parameters is None or bool(parameters[switch.parameter])
                words += [*(switch.on if is_on else ()), *(switch.off if not is_on or parameters is None else ())]
        return tuple(words)


class Memory(Data):
    """What the pair must have; GiB are 2**30 bytes, per node."""

    required_gib: Gib = Field(description="MemAvailable that a node must show before the start")
    weights_gib: Gib = Field(0, description="Weights held by one rank")
    kv_bytes: Bytes = Field(0, description="Key-value cache of one rank, in bytes")
    kv_bytes_per_token: float = Field(0, description="What one token takes of it: a context beyond it is refused", ge=0)
    floor_gib: Gib = Field(2, description="MemAvailable below which a serving node is in danger")
    # Engines keep the floor themselves and may touch it: what ends a start lies well below.
    guard_gib: Gib = Field(1, description="MemAvailable at which a node kills its loading rank, before it hangs")
    first_start_disk_bytes: Bytes = Field(0, description="What the first start writes to the cache directory of a node")


class Phase(Data):
    """A line of the engine's log that shows how far the load is."""

    name: str = Field(description="What to show")
    pattern: Regex = Field(description="Regular expression; groups `done` and `total` are shown as n/N")


class KnownFailure(Data):
    """A line of the engine's log that means trouble."""

    pattern: Regex = Field(description="Regular expression")
    cause: str = Field(description="What it means, in plain words")
    advice: str = Field(description="What to do")
    fatal: bool = Field(default=True, description="Whether the start is given up when the line appears")
    serving: bool = Field(default=False, description="Whether the line means that a serving pair is broken")


class Readiness(Data):
    """When the engine counts as ready: a real completion is always asked for; this tells where and how long."""

    health: str = Field("/health", description="Path that answers once HTTP is open")
    first_seconds: Seconds = Field(3600, description="Deadline of the first start (compiling, rank cache), in seconds")
    later_seconds: Seconds = Field(1200, description="Deadline of later starts, in seconds")
    warm_files: str = Field("", description="Glob of files of a node that only a finished first start leaves")
    warm_up_tokens: int = Field(0, description="Length of a first prompt after the start, 0 for none", ge=0)
    worker_port: str = Field("", description="Name (in `ports`) of what rank 1 must open before rank 0 is started")


class Counters(Data):
    """Names of Prometheus counters that show work in flight."""

    path: str = Field("/metrics", description="Path of the metrics")
    running: str = Field(description="Gauge of requests in flight")
    waiting: str = Field("", description="Gauge of requests that wait")
    moving: tuple[str, ...] = Field(description="Counters of which one moves while work goes on", min_length=1)
    generated: str = Field("", description="Counter of generated tokens")
    stalled_seconds: Seconds = Field(120, description="Requests run and no counter moved for so long: stalled")


class Verify(Data):
    """What `sparkserve verify` can ask of this model."""

    checks: tuple[CheckName, ...] = Field(("answer", "thinking", "tool", "schema", "needle"), description="Requests")
    thinking_on: dict[str, Any] = Field(default_factory=dict, description="Request fields that turn thinking on")
    thinking_off: dict[str, Any] = Field(default_factory=dict, description="Request fields that turn thinking off")
    needle_tokens: int = Field(24_000, description="Rough length of the long prompt, in tokens", ge=1)
    untrained: bool = Field(default=False, description="Random weights: what needs a trained model is not applicable")


class Tuning(Data):
    """Kernel settings of both nodes; the old values are kept and can be put back."""

    # Memory settings only: others, such as kernel.core_pattern, can make the kernel run a program.
    sysctl: dict[Annotated[str, Field(pattern=r"^vm\.[a-z_]+$")], Annotated[str, Field(pattern=r"^\d+$")]] = Field(
        default_factory=dict, description="Name (`vm.…`) and value of each sysctl"
    )


class Figure(Data):
    """A published figure to compare with."""

    name: str = Field(description="What was measured")
    value: float = Field(description="The figure")
    unit: str = Field(description="Its unit")
    source: str = Field(description="Who published it, and when")


class Recipe(Data):
    """All of a recipe; `directories` (its own, then those that it extends) is filled in by the loader."""

    schema_version: Literal[1] = Field(alias="schema", description="Version of this format")
    name: str = Field(description="Name of the recipe", pattern=r"^[a-z0-9][a-z0-9.-]*$")
    title: str = Field(description="One line for a list")
    engine: str = Field(description="Engine family: tensorfold, vllm, sglang, …; only a label")
    licence: str = Field("", description="Licences of the parts")
    proven: bool = Field(default=False, description="Whether it was started on real Sparks")
    why: str = Field("", description="What is proved or what is missing")
    system: str = Field("", description="The published setup that it follows")
    warnings: tuple[str, ...] = Field((), description="Told before the engine starts")
    parameters: Parameters
    ports: Ports
    weights: tuple[Weights, ...] = Field(description="Empty where a mount that `must_exist` holds the owner's model")
    derived: tuple[Derived, ...] = ()
    chat_template: ChatTemplate | None = None
    image: Image
    container: Container = Container()
    launch: Launch
    memory: Memory
    phases: tuple[Phase, ...] = ()
    failures: tuple[KnownFailure, ...] = ()
    readiness: Readiness = Readiness()
    counters: Counters | None = None
    verification: Verify = Field(default=Verify(), alias="verify")
    tuning: Tuning = Tuning()
    figures: tuple[Figure, ...] = ()
    directories: tuple[Path, ...] = Field((), exclude=True)

    @model_validator(mode="after")
    def _names_are_single(self) -> Recipe:
        """Refuse what would hide another of its kind, since it is known by this from here on."""
        weights = [item.name for item in self.weights]
        places = {"derived": [item.mount for item in self.derived], "ports": ["api", "master", *self.ports.more]}
        for kind, names in {"weights": weights, **places}.items():
            if doubled := [name for name in names if names.count(name) > 1]:
                raise ValueError(f"{kind}: {doubled[0]} is there twice; each needs one of its own")
        for item in self.derived:
            if item.weights and item.weights not in weights:
                raise ValueError(f"derived {item.name}: there are no weights {item.weights}")
        if not self.weights and not any(mount.must_exist for mount in self.container.mounts):
            raise ValueError("`weights` should name at least one source, or a mount that `must_exist` hold the model")
        return self

    @model_validator(mode="after")
    def _arguments_arrive(self) -> Recipe:
        for rank in (0, 1):
            shells = [word for word in self.program(rank) if PurePosixPath(word).name in _SHELLS]
            # `bash -c` takes one argument for its script.
            if shells and not (self.runs_script(rank) and len(self.launch.words_of(rank)) == 1):
                name = "launch.worker_entrypoint" if rank and self.launch.worker_entrypoint else "image.entrypoint"
                raise ValueError(f"{shells[0]} of `{name}` would swallow the arguments; name the engine's own program")
        return self

    def program(self, rank: int) -> tuple[str, ...]:
        """Give the entry point of one rank."""
        return (self.launch.worker_entrypoint if rank else ()) or self.image.entrypoint

    def runs_script(self, rank: int) -> bool:
        """Whether a rank's one argument is a shell's script: any other would become `$0` and `$1` of it."""
        *before, last = self.program(rank)
        return bool(re.fullmatch(r"-[a-z]*c", last)) and any(PurePosixPath(word).name in _SHELLS for word in before)

    @model_validator(mode="after")
    def _names_are_known(self) -> Recipe:
        known = {*PLACEHOLDERS, *(f"ports.{name}" for name in self.ports.more)} - {"ports.NAME"}
        for text in self.templated_texts():
            for name in PLACEHOLDER.findall(text):
                if name not in known and not SECRET.fullmatch(name):
                    raise ValueError(f"${{{name}}} in {text!r} is unknown{nearest_name(name, known)}")
        if (port := self.readiness.worker_port) and port not in self.ports.named:
            raise ValueError(f"`readiness.worker_port`: there is no port {port}{nearest_name(port, self.ports.named)}")
        return self

    def templated_texts(self) -> Iterator[str]:
        """List every text in which `${…}` is replaced."""
        launch = self.launch
        yield from (*launch.words_of(0), *launch.words_of(1))
        for env in (launch.env, launch.head_env, launch.worker_env):
            yield from env.values()
        yield self.readiness.warm_files
        for mount in self.container.mounts:
            yield mount.source

    @property
    def disk_bytes(self) -> int:
        """Roughly what all of it takes on one node's disks."""
        files = sum(item.expected_bytes for item in self.weights) + sum(item.expected_bytes for item in self.derived)
        return files + self.image.expected_bytes + self.memory.first_start_disk_bytes

    def file(self, name: str) -> bytes:
        """Read a file of the recipe: its own, or that of the recipe it extends."""
        for directory in self.directories:
            path = directory / name
            if path.is_file() and directory.resolve() in path.resolve().parents:
                return path.read_bytes()
        raise usage_error("recipe_file", f"recipe {self.name} has no file {name}", f"`ls {self.directories[0]}`")
