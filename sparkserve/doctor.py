"""The story of a check-up: both nodes looked at over one connection, every rule applied, and nothing changed."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from sparkserve import blueprint, image, image_facts, link, lock, preflight, system, weights
from sparkserve.checks import Check, DiskNeed, Subject
from sparkserve.cluster import ROLES, Cluster, Deployment, Node, Role, connect
from sparkserve.doctor_record import Recorder, write_record
from sparkserve.errors import EXIT_COULD_NOT_LOOK, EXIT_FAILED, SparkserveError
from sparkserve.lifecycle import Session
from sparkserve.link_proof import FLOOR_GBPS
from sparkserve.operations import prove_cable
from sparkserve.pair_checks import Difference, compare
from sparkserve.parameters import decide_ports, read_api_key
from sparkserve.settings import Settings


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
        verdicts = {check.verdict for check in self.checks}
        if self.unseen or ("unseen" in verdicts and "fail" not in verdicts):
            return EXIT_COULD_NOT_LOOK
        return EXIT_FAILED if "fail" in verdicts else 0


@dataclass(frozen=True)
class _Look:
    """One node: facts, its end of the cable, what is still to be written there, the engine image by its layers."""

    system: system.SystemFacts
    link: link.LinkFacts
    needs: tuple[DiskNeed, ...]
    image: str


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
        subject = _find_cable(session, cluster, looks)
        checks = [*_reached(session, unseen), *preflight.judge(subject)]
        can_prove = not unseen and not subject.unread_key and all(end.interface for end in subject.links.values())
        if proves_link and can_prove:
            checks += prove_cable(session, cluster, dict(subject.links), FLOOR_GBPS)
        differences = compare(subject)
        if differences:
            differences.append(Difference("engine image", *(looks[role].image for role in ROLES)))
        if record and recorders:
            ends = {**{role: look.link for role, look in looks.items()}, **subject.links}
            places = {role: blueprint.see_node(cluster.node(role), end) for role, end in ends.items()}
            write_record(record, deployment, places, recorders)
    again = f"sparkserve doctor{_given(session)}"
    checks = [replace(check, hint=check.advice.replace("sparkserve doctor", again)) for check in checks]
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
    facts = system.gather(node, (ports.api, ports.master))
    recipe, known = deployment.recipe, not isinstance(deployment.lock, lock.OpenLock)
    missing = sum(one.expected_bytes for one in recipe.weights)
    layers = None
    if known:
        missing = weights.bytes_missing(deployment.lock, weights.gather(node, deployment.lock))
        found = None if facts.docker.error else image_facts.look(node, image.tag_of(recipe, deployment.lock))
        layers = found and hashlib.sha256("".join(found.layers).encode()).hexdigest()[:12]
    # While an image is loaded, Docker holds the stream and the unpacked layers.
    unpacked = 0 if layers else recipe.image.expected_bytes * (1 + node.rank)
    needs = [DiskNeed(node.role, "models", missing, "weights"), DiskNeed(node.role, "docker", unpacked, "engine image")]
    needs += preflight.first_start_needs(deployment, node)
    return _Look(facts, link.gather(node), tuple(needs), layers or "absent")


def _find_cable(session: Session, cluster: Cluster, looks: Mapping[Role, _Look]) -> Subject:
    """Put together what is judged; a worker without any settings is looked at over the likeliest cable."""
    settings, loaded = session.settings, session.loaded
    links = {role: look.link for role, look in looks.items()}
    is_named = loaded.sources["worker"] != "flag" or loaded.env_file.exists() or settings.head_link
    if not is_named and len(links) < len(ROLES):
        links = {}  # which interface it is, both nodes have to say
    proposals = link.propose(links) if links and not is_named else []
    if proposals:
        best = proposals[0]
        update = {"head_link": best.head_address, "worker_link": best.worker_address}
        settings = settings.model_copy(update=update)
        for node in cluster.nodes:
            node.settings = settings
        links = cluster.on_both(link.gather)
    facts = {role: look.system for role, look in looks.items()}
    needs = tuple(need for look in looks.values() for need in look.needs)
    return Subject(settings, session.recipe, facts, links, needs, unread_key=_try_key(settings))


def _try_key(settings: Settings) -> SparkserveError | None:
    try:
        read_api_key(settings)
    except SparkserveError as error:
        return error
    return None


def _reached(session: Session, unseen: Mapping[Role, SparkserveError]) -> list[Check]:
    """Say of each node whether it could be looked at, and if not why."""
    checks = []
    for role in ROLES:
        needed = "a node that can be asked"
        error = unseen.get(role)
        if error is None:
            observed = "this machine" if role == "head" else f"{session.settings.worker} answers"
            checks.append(Check("reach", role, "ok", observed, needed))
        else:
            name = "python" if error.code == "python_missing" else "reach"
            checks.append(Check(name, role, "unseen", error.message, needed, error.hint))
    return checks


def _given(session: Session) -> str:
    """Give the words of this command that a command in a hint needs, too."""
    loaded = session.loaded
    flags = {"": "worker", "-r": "recipe"}
    words = [
        word
        for flag, name in flags.items()
        if loaded.sources[name] == "flag"
        for word in (flag, getattr(loaded.settings, name))
    ]
    if loaded.env_file != Path(".env"):
        words += ["-e", str(loaded.env_file)]
    return "".join(f" {shlex.quote(word)}" for word in words if word)
