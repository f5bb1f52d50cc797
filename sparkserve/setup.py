"""The first story: from a worker's address to a `.env`, by looking at both nodes; nothing else is written."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkserve import link, ssh_trust, system
from sparkserve.checks import show_size
from sparkserve.cluster import ROLES, Cluster, Node, Role, connect
from sparkserve.env_file import render
from sparkserve.errors import SparkserveError, usage_error
from sparkserve.hosts import LocalHost
from sparkserve.lifecycle import find_recipe
from sparkserve.link import LinkFacts, Proposal
from sparkserve.recipe import Recipe
from sparkserve.settings import Loaded, Settings, check_answer, load, parse_env, variable_name
from sparkserve.system import DiskFacts, SystemFacts, parse_disk
from sparkserve.system_text import parse_mounts

if TYPE_CHECKING:
    from sparkserve.output import Output

# What is asked, and the flag that answers it where nobody can be asked.
QUESTIONS = {
    "worker": (
        "The worker, as ssh reaches it: address, name or user@address",
        "ADDRESS, as in `sparkserve init spark@192.168.1.22`",
    ),
    "recipe": ("Recipe (`sparkserve recipes` lists them)", "--recipe NAME"),
    "models_dir": ("Directory of the weights", "--models-dir DIR"),
    "head_link": ("The head's address on the cable", "--head-link ADDRESS"),
    "worker_link": ("The worker's address on the cable", "--worker-link ADDRESS"),
}
_HEADING = ("Written by `sparkserve init`; change it as you like. The lines with # show what holds without them.",)
_FILE_SYSTEMS = ("btrfs", "ext3", "ext4", "f2fs", "xfs", "zfs")
_NEIGHBOURS = ["ip", "-json", "-4", "neigh"]
_HOME = "~/sparkserve"
_DISCARD_PORT = 9
_SSH_PORT = 22
_ANSWER_SECONDS = 1.0
_SMALL_NETWORK = 24
# Room that stays free beside what a recipe needs.
_MARGIN = 2_000_000_000


@dataclass(frozen=True)
class Wish:
    """What was asked for on the command line; `flags` are settings by name, `accept` a fingerprint.

    With `dry_run` nothing is written: a worker whose host key is not known cannot be looked at then.
    """

    env_file: Path
    flags: Mapping[str, str | None]
    environment: Mapping[str, str]
    accept: str | None = None
    force: bool = False
    from_running: bool = False
    dry_run: bool = False


@dataclass(frozen=True)
class Seen:
    """One node: its facts, and the file systems that could hold a model, the roomiest first."""

    system: SystemFacts
    link: LinkFacts
    disks: tuple[DiskFacts, ...]


@dataclass
class Setup:
    """What came of it: the file, its values by setting, both nodes, the proposed cable, and what is left to do.

    `loaded` and `text` are the settings and the file as they will be; with `from_running` the file is still to write.
    `cluster` is connected for who looks further.
    """

    env_file: Path
    values: dict[str, str]
    loaded: Loaded
    cluster: Cluster = field(repr=False)
    text: str = field(default="", repr=False)
    seen: dict[Role, Seen] = field(default_factory=dict)
    proposal: Proposal | None = None
    trusted: ssh_trust.HostKey | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class Choices:
    """The settings under way: what is given stands, the rest is asked with a default."""

    loaded: Loaded
    voice: Output
    values: dict[str, str] = field(default_factory=dict)

    def is_given(self, name: str) -> bool:
        """Whether a flag or the environment says it."""
        return self.loaded.sources[name] in ("flag", "environment")

    def is_open(self, name: str) -> bool:
        """Whether nobody says it, not even an earlier file."""
        return self.loaded.sources[name] == "default"

    def choose(self, name: str, proposal: str = "", check: Callable[[str], object] = str) -> str:
        """Settle one setting; without a proposal the default is what the file or the setting itself has.

        `check` raises for a wrong answer; a person who typed it is told, and asked again.
        """
        own = str(getattr(self.loaded.settings, name))
        question, flag = QUESTIONS[name]
        default = proposal or own
        while True:
            answer = own if self.is_given(name) else self.voice.ask_value(question, default, flag)
            try:
                check_answer(name, answer)
                check(answer)
            except SparkserveError as error:
                if self.is_given(name) or answer == default:
                    raise
                self.voice.say(f"{error}; {error.hint}")
            else:
                self.values[name] = answer
                return answer


@contextmanager
def init(wish: Wish, voice: Output, show: Callable[[Setup], None]) -> Iterator[Setup]:
    """Make the worker known, look at both nodes, and write their `.env`; `show` gets what was seen before it asks."""
    path = wish.env_file.resolve()
    if path.is_dir():
        raise usage_error("settings_unreadable", f"{path} is a directory", "name a file with --env-file")
    is_kept = path.exists() and not (wish.force or wish.dry_run)
    if is_kept and not voice.ask(f"{path} is there already. Write it anew?", "--force"):
        raise usage_error("settings_kept", f"{path} is as it was", "look at it with `sparkserve config`")
    old = path if path.exists() else Path(os.devnull)
    loaded = load(old, wish.environment, wish.flags)
    choices = Choices(loaded, voice)
    neighbour = _find_neighbour(loaded.settings) if choices.is_open("worker") else ""
    if neighbour:
        voice.say(f"{neighbour} answers at the other end of the cable; any address that ssh reaches will do")
    choices.choose("worker", neighbour, _check_worker)
    if choices.is_given("recipe"):  # before anybody looks at two machines for it
        find_recipe(loaded.settings.recipe, wish.environment)
    settings = load(Path(os.devnull), {}, {**loaded.settings.model_dump(), **choices.values}).settings
    trusted = None if wish.dry_run else ssh_trust.meet(settings, wish.accept, voice.ask)
    with connect(settings) as cluster:
        found = Setup(path, choices.values, loaded, cluster, trusted=trusted)
        found.seen = cluster.on_both(_look)
        show(found)
        # The recipe of a pair that runs is written afterwards, and uses its files where they lie.
        find = partial(find_recipe, environment=wish.environment)
        recipe = find(Settings().recipe if wish.from_running else choices.choose("recipe", check=find))
        if not wish.from_running:
            found.notes += choose_places(choices, found.seen, recipe)
        found.proposal, notes = choose_link(choices, found.seen, recipe)
        found.notes += notes
        found.loaded = replace(load(old, wish.environment, choices.values), env_file=path)
        found.text = _text(old, choices.values)
        if not (wish.from_running or wish.dry_run):
            LocalHost("head").write(path, found.text.encode(), 0o600)
        for node in cluster.nodes:
            node.settings = found.loaded.settings
        yield found


def _check_worker(answer: str) -> None:
    if not answer:
        raise usage_error("settings_invalid", "the worker's name is empty", "it is an address, a name or user@address")


def _text(path: Path, values: Mapping[str, str]) -> str:
    """Give the new file: the values chosen, and those of the old file that nobody chose anew."""
    old = parse_env(path.read_text(encoding="utf-8"))[0]
    kept = {name: old[variable_name(name)] for name in Settings.model_fields if old.get(variable_name(name))}
    return render(_HEADING, {**kept, **values}, {})


def _find_neighbour(settings: Settings) -> str:
    """Give the address of the one machine at the other end of the cable; empty where there is none, or more than one.

    Who never heard of it is asked for by a packet to each address of the cable's own small network.
    """
    head = Node("head", LocalHost("head"), settings)
    try:
        facts = link.gather(head)
        ports = {device.interface for device in facts.devices if device.active}
        for address in list_unheard(facts, ports):
            with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.sendto(b"", (address, _DISCARD_PORT))
        found, deadline = "", time.monotonic() + _ANSWER_SECONDS
        while ports and not found and time.monotonic() < deadline:
            time.sleep(_ANSWER_SECONDS / 10)
            answer = head.session.ask("facts", commands={"neighbours": _NEIGHBOURS})["commands"]["neighbours"]
            found = parse_neighbours(answer["out"] if answer and answer["code"] == 0 else "[]", ports)
        return found if found and _is_there(found) else ""
    finally:
        head.close()


def _is_there(address: str) -> bool:
    """Whether a machine is at an address now: the kernel remembers neighbours that are long gone."""
    try:
        socket.create_connection((address, _SSH_PORT), _ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def list_unheard(facts: LinkFacts, ports: Set[str]) -> Iterator[str]:
    """List the addresses that the other end of these ports may have, where its network is a small one."""
    for one in facts.interfaces:
        for network in map(ipaddress.IPv4Network, one.networks if one.name in ports else ()):
            if network.prefixlen >= _SMALL_NETWORK:
                yield from (str(host) for host in network.hosts() if str(host) not in one.addresses)


def parse_neighbours(text: str, ports: Set[str]) -> str:
    """Give who answered on these interfaces, from `ip -json neigh`, where it is one machine: one for each half."""
    rows: list[dict[str, Any]] = json.loads(text or "[]")
    found = sorted((row["dev"], str(row["dst"])) for row in rows if row.get("dev") in ports and "lladdr" in row)
    cables = {link.port_of(name) for name, _ in found}
    if len(cables) != 1 or len(dict(found)) != len(found):
        return ""
    return min(found, key=lambda item: len(item[0]))[1]


# -- both nodes -------------------------------------------------------------------------------------------------------


def _look(node: Node) -> Seen:
    mounts = node.session.ask("facts", files=["/proc/mounts"])["files"]["/proc/mounts"]
    places = [place for place, kind in parse_mounts(mounts or "") if kind in _FILE_SYSTEMS]
    rooms = node.session.ask("facts", disks=places)["disks"]
    disks = sort_disks([parse_disk(place, rooms[place]) for place in places])
    return Seen(system.gather(node), link.gather(node), disks)


def sort_disks(disks: Sequence[DiskFacts]) -> tuple[DiskFacts, ...]:
    """Keep one place for each file system, its first, if we may write there; the roomiest is first."""
    first = {disk.device: disk for disk in reversed(disks)}
    return tuple(sorted((disk for disk in first.values() if disk.writable), key=lambda disk: -disk.free))


def pick_place(seen: Seen, size: int) -> str:
    """Choose where weights and caches go: the home if it has room, else the roomiest disk; empty where none has."""
    if seen.system.disks["models"].free >= size + _MARGIN:
        return _HOME
    disk = next(iter(seen.disks), None)
    return f"{disk.path.rstrip('/')}/sparkserve" if disk and disk.free >= size + _MARGIN else ""


def choose_places(choices: Choices, seen: Mapping[Role, Seen], recipe: Recipe) -> list[str]:
    """Settle the directories of both nodes; tells where nothing has room."""
    if not choices.is_open("models_dir"):
        choices.choose("models_dir")
        choices.values["cache_dir"] = str(choices.loaded.settings.cache_dir)  # said, since it may be as large
        return []
    size = recipe.disk_bytes
    picked = {role: pick_place(seen[role], size) for role in ROLES}
    head, worker = (picked[role] or _HOME for role in ROLES)
    is_ours = choices.choose("models_dir", f"{head}/models") == f"{head}/models"
    if is_ours and choices.is_open("cache_dir"):
        choices.values["cache_dir"] = f"{head}/cache"
        if worker != head:
            choices.values |= {"worker_models_dir": f"{worker}/models", "worker_cache_dir": f"{worker}/cache"}
    return [
        f"{role}: no file system that you may write to has {show_size(size)} free, which {recipe.name} needs"
        for role in ROLES
        if is_ours and not picked[role]
    ]


def choose_link(choices: Choices, seen: Mapping[Role, Seen], recipe: Recipe) -> tuple[Proposal | None, list[str]]:
    """Settle the addresses on the cable; where none can be proposed or were given, they stay open."""
    given = {name: getattr(choices.loaded.settings, name) for name in ("head_link", "worker_link")}
    given = {name: address for name, address in given.items() if choices.is_given(name)}
    owned = {f"{role}_link": partial(_check_owned, role, seen[role].link) for role in ROLES}
    for name, address in given.items():
        owned[name](address)
    needs_rdma = "/dev/infiniband" in recipe.container.devices
    found = [
        one
        for one in link.propose({role: seen[role].link for role in ROLES}, needs_rdma=needs_rdma)
        if given.get("head_link", one.head_address) == one.head_address
        and given.get("worker_link", one.worker_address) == one.worker_address
    ]
    best = found[0] if found else None
    if best is None and len(given) < 2:
        choices.values |= given
        ends = " and ".join([*given.values(), "the other node"]) if given else "the cable's ports of both nodes"
        text = f"{ends} share no network{' of RDMA ports' * needs_rdma}"
        return None, [f"{text}: docs/network.md shows how to give them addresses; then `sparkserve init --force`"]
    choices.choose("head_link", best.head_address if best else "", owned["head_link"])
    choices.choose("worker_link", best.worker_address if best else "", owned["worker_link"])
    return best, []


def _check_owned(role: Role, facts: LinkFacts, answer: str) -> None:
    """Refuse an address that no interface of the node has."""
    rows = [f"{one.name} {', '.join(one.addresses)}" for one in facts.interfaces if one.addresses and not one.soft]
    if not any(answer in one.addresses for one in facts.interfaces):
        hint = f"the {role} has {'; '.join(rows) or 'no address at all'}"
        raise usage_error("link_unowned", f"no interface of the {role} has the address {answer}", hint)
