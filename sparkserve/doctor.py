"""The story of a check-up: both nodes looked at over one connection, every rule applied, and nothing changed."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from sparkserve import (
    blueprint,
    engine,
    image_facts,
    link,
    lock,
    planning,
    preflight,
    system,
    takeover_facts,
    tuning,
    weights,
)
from sparkserve.checks import Check, DiskNeed, Subject
from sparkserve.cluster import ROLES, Cluster, Deployment, Node, Role, connect
from sparkserve.doctor_record import Recorder, write_record
from sparkserve.errors import EXIT_COULD_NOT_LOOK, SparkserveError, exit_code_of, with_settings_file
from sparkserve.lifecycle import Session
from sparkserve.link_proof import FLOOR_GBPS
from sparkserve.operations import prove_cable
from sparkserve.pair_checks import Difference, compare
from sparkserve.parameters import decide_ports, read_api_key, read_sudo_password
from sparkserve.plan import Change, Plan
from sparkserve.recipe import Recipe
from sparkserve.settings import Settings

Found = TypeVar("Found")


@dataclass(frozen=True)
class Report:
    """What a check-up found; `unseen` says of a node why nothing of it is known."""

    checks: tuple[Check, ...]
    differences: tuple[Difference, ...]
    unseen: Mapping[Role, SparkserveError] = field(default_factory=dict)
    seconds: float = 0.0
    recorded: str = ""

    @property
    def exit_code(self) -> int:
        """1 where a check fails, 6 where something could not be looked at; a node that could not outranks the rest."""
        return EXIT_COULD_NOT_LOOK if self.unseen else exit_code_of(self.checks)


@dataclass(frozen=True)
class _Look:
    """One node: facts, its end of the cable, what runs, the engine image; and by check what could not be read."""

    system: system.SystemFacts
    link: link.LinkFacts
    running: takeover_facts.Facts | None
    image: str
    unread: Mapping[str, SparkserveError]


def examine(
    session: Session, opened: Cluster | None = None, *, proves_link: bool = False, record: Path | None = None
) -> Report:
    """Look at both nodes and judge; a worker that cannot be reached leaves the head's checks and the reason."""
    begun = time.monotonic()
    if record:
        blueprint.refuse_other_file(record)
    with nullcontext(opened) if opened else connect(session.settings, lenient=True) as cluster:
        recorders: dict[Role, Recorder] | None = {} if record else None
        known = _read_lock(session)
        deployment = Deployment(session.settings, session.recipe, known or lock.open_lock(session.recipe), cluster)
        looks, unseen = cluster.try_both(lambda node: _look(node, deployment, recorders))
        answering = [role for role, look in looks.items() if not look.system.docker.error]
        needs = _find_needs(deployment, looks.keys(), plans=len(answering) == len(ROLES))
        subject = replace(_find_cable(session, cluster, looks), needs=tuple(needs))
        running = {role: look.running for role, look in looks.items() if look.running is not None}
        checks = [*_reached(session, unseen), *preflight.judge(subject), *preflight.check_foreign_containers(running)]
        if proves_link and sum(bool(end.interface) for end in subject.links.values()) == len(ROLES):
            checks += prove_cable(session, cluster, dict(subject.links), FLOOR_GBPS)
        differences = compare(subject)
        if differences:
            differences.append(Difference("engine image", *(looks[role].image for role in ROLES)))
        if record and recorders:
            ends = {**{role: look.link for role, look in looks.items()}, **subject.links}
            places = {role: blueprint.see_node(cluster.node(role), end) for role, end in ends.items()}
            write_record(record, deployment, places, recorders)
    again = f"sparkserve doctor{_given(session)}"
    file = str(session.loaded.env_file)
    checks = [
        replace(check, hint=with_settings_file(check.advice.replace("sparkserve doctor", again), file))
        for check in checks
    ]
    return Report(tuple(checks), tuple(differences), unseen, time.monotonic() - begun, str(record or ""))


def _read_lock(session: Session) -> lock.Lock | None:
    """Read the lock; one that belongs to other settings is told, and keeps nobody from looking."""
    try:
        return lock.read_lock(session.lock_file, session.recipe, session.settings)
    except SparkserveError as error:
        session.voice.warn(f"{error.message}; disk needs are the recipe's rough ones")
        return None


def _look(node: Node, deployment: Deployment, recorders: dict[Role, Recorder] | None) -> _Look:
    if recorders is not None:
        recorders[node.role] = Recorder(node)
    ports = decide_ports(deployment.settings, deployment.recipe)
    facts = system.gather(node, tuple(ports.named.values()), root_commands(deployment.recipe))
    unread: dict[str, SparkserveError] = {}

    def attempt(check: str, look: Callable[[], Found], otherwise: Found) -> Found:
        """Look; a tool or an engine that gives no answer must not take the rest of its node away."""
        try:
            return look()
        except SparkserveError as error:
            if error.code not in ("link_unseen", "docker_unreachable", "node_silent", "sudo_password"):
                raise
            unread[check] = error
            return otherwise

    end = attempt("link_address", lambda: link.gather(node), link.UNSEEN)
    running: takeover_facts.Facts | None = None
    layers = "could not look"
    if not facts.docker.error:  # a silent engine would be waited for again
        running = attempt("containers", lambda: takeover_facts.gather(node), None)
        layers = attempt("image", lambda: _name_image(node, deployment), layers)
    if facts.sudo.startswith("password"):
        attempt("sudo", lambda: _try_password(node, deployment.settings), None)
    return _Look(facts, end, running, layers, unread)


def root_commands(recipe: Recipe) -> list[list[str]]:
    """List what `tune` and a start run as root."""
    return [["true"], *tuning.root_commands(recipe.tuning.sysctl), ["tee", engine.DROP_CACHES]]


def _try_password(node: Node, settings: Settings) -> None:
    with contextlib.suppress(SparkserveError):  # of a file that cannot be read is told apart
        node.host.sudo_password = read_sudo_password(settings)
    node.host.check_sudo_password()


def _name_image(node: Node, deployment: Deployment) -> str:
    """Name the engine image by its layers, which are the same on both nodes."""
    if isinstance(deployment.lock, lock.OpenLock):
        return "not known before `sparkserve lock`"
    found = image_facts.look(node, image_facts.tag_of(deployment.recipe, deployment.lock))
    return hashlib.sha256("".join(found.layers).encode()).hexdigest()[:12] if found else "absent"


def _find_needs(deployment: Deployment, roles: Collection[Role], *, plans: bool) -> list[DiskNeed]:
    """Add up what `up` would write; where that cannot be planned yet, what is known of it, or the recipe's guess."""
    recipe, nodes = deployment.recipe, [deployment.cluster.node(role) for role in roles]
    is_locked = not isinstance(deployment.lock, lock.OpenLock)
    if is_locked and plans:
        begin = zip(ROLES, ("download", "sync"), strict=True)
        fetch = [Change(role, step, "weights", "not looked at", "there", lambda _work: "") for role, step in begin]
        with contextlib.suppress(SparkserveError):  # of Docker, whose own check tells
            later = planning.plan_preparation(deployment)
            return preflight.disk_needs(deployment, Plan(tuple(fetch), tuple(later)))
    needs = []
    for node in nodes:
        missing = sum(one.expected_bytes for one in recipe.weights)
        if is_locked:
            missing = weights.bytes_missing(deployment.lock, weights.gather(node, deployment.lock))
        image_bytes = 0 if is_locked else 2 * recipe.image.expected_bytes
        needs += [DiskNeed(node.role, "models", missing, "weights")]
        needs += [DiskNeed(node.role, "docker", image_bytes, "engine image")]
        needs += preflight.first_start_needs(deployment, node)
    return needs


def _find_cable(session: Session, cluster: Cluster, looks: Mapping[Role, _Look]) -> Subject:
    """Put together what is judged; a worker without any settings is looked at over the likeliest cable."""
    settings, loaded = session.settings, session.loaded
    unread = _try_secrets(settings)
    unread |= {(name, role): error for role, look in looks.items() for name, error in look.unread.items()}
    links = {role: look.link for role, look in looks.items() if ("link_address", role) not in unread}
    is_named = loaded.sources["worker"] != "flag" or loaded.env_file.exists() or settings.head_link
    if not is_named and len(links) < len(ROLES):
        links = {}  # which interface it is, both nodes have to say
    facts = {role: look.system for role, look in looks.items()}
    subject = Subject(settings, session.recipe, facts, links, unread=unread)
    proposals = link.propose(links, needs_rdma=subject.uses_rdma) if links and not is_named else []
    if not proposals:
        return subject
    best = proposals[0]
    settings = settings.model_copy(update={"head_link": best.head_address, "worker_link": best.worker_address})
    for node in cluster.nodes:
        node.settings = settings
    links = {node.role: link.locate(links[node.role], node.link_address) for node in cluster.nodes}
    return replace(subject, settings=settings, links=links)


def _try_secrets(settings: Settings) -> dict[tuple[str, str], SparkserveError]:
    """Read the files that a start would read, to tell of those that cannot be."""
    found: dict[tuple[str, str], SparkserveError] = {}
    for name, read in (("api_key", read_api_key), ("sudo", read_sudo_password)):
        try:
            read(settings)
        except SparkserveError as error:
            found |= {(name, role): error for role in ROLES}
    return found


def _reached(session: Session, unseen: Mapping[Role, SparkserveError]) -> list[Check]:
    """Say of each node whether it could be looked at, and if not why."""
    needed = "a node that can be asked"
    told = {"head": "this machine", "worker": f"{session.settings.worker} answers"}
    checks = [Check("reach", role, "ok", told[role], needed) for role in ROLES if role not in unseen]
    for role, error in unseen.items():
        name = "python" if error.code == "python_missing" else "reach"
        checks.append(Check(name, role, "unseen", error.message, needed, error.hint))
    return checks


def _given(session: Session) -> str:
    """Give the words of this command that a command in a hint needs, too."""
    settings, sources = session.settings, session.loaded.sources
    words = [settings.worker] if sources["worker"] == "flag" else []
    words += ["-r", settings.recipe] if sources["recipe"] == "flag" else []
    return "".join(f" {shlex.quote(word)}" for word in words)
