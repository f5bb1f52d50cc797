"""The stories of a pair that runs: looking, watching, stopping, and what is kept of earlier runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from sparkserve import around, blueprint, engine, engine_logs, lifecycle, link, link_proof, lock, records, status_look
from sparkserve.around import AroundFacts, Trend
from sparkserve.checks import Check, Subject
from sparkserve.cluster import Cluster, Deployment, Role, connect, lock_holder, pair_lock
from sparkserve.endpoint import Endpoint, open_endpoint
from sparkserve.engine_facts import LOOK_SECONDS
from sparkserve.engine_logs import LogLine, LogQuery
from sparkserve.engine_stop import Stopping
from sparkserve.errors import EXIT_NOT_READY, Failures, SparkserveError, with_settings_file
from sparkserve.lifecycle import Outcome, Session
from sparkserve.pair_checks import check_link
from sparkserve.parameters import decide_parameters, decide_ports, secrets_to_mask
from sparkserve.plan import ApplyReport, Interrupted, Plan, apply
from sparkserve.records import Record
from sparkserve.source_checks import remove_readers
from sparkserve.status_look import Question, Status
from sparkserve.watch import Event, Journal, Watch

# One look of a watch waits no longer for a counter to move: the next one comes soon enough.
_GLANCE_SECONDS = 0.2
_TOKEN_SECONDS = 30.0
# So long a watch may take to end the restart that it is at.
_GIVE_WAY_SECONDS = 120.0


@dataclass(frozen=True)
class View:
    """A status with what surrounds it."""

    status: Status
    context: int | None
    around: dict[Role, AroundFacts] = field(default_factory=dict)
    trends: dict[Role, Trend] = field(default_factory=dict)


def following(session: Session) -> Session:
    """Give a session of the recipe that was started last, where the command line names none."""
    wanted = records.read_wanted(session.state)
    if session.loaded.sources["recipe"] == "flag" or wanted.recipe in ("", session.settings.recipe):
        return session
    flags = {"recipe": wanted.recipe}
    return lifecycle.open_session(session.command, session.loaded.env_file, session.environment, flags, session.voice)


def start_steps(session: Session) -> tuple[str, ...]:
    """Tell which steps a start takes: all of them where another recipe is to take the place of the one that serves."""
    wanted = records.read_wanted(session.state)
    named = session.loaded.sources["recipe"] == "flag"
    if named and wanted.serving and wanted.recipe != session.settings.recipe:
        return tuple(step for step in lifecycle.STEPS if step != "tune")
    return ("start",)


class Eyes:
    """Looks at the pair any number of times over one connection, which is opened anew when it was lost."""

    def __init__(self, session: Session) -> None:
        self._given = session
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self._session, self._endpoint = self._open()

    def _open(self) -> tuple[Session, Endpoint]:
        session = following(self._given)
        endpoint = open_endpoint(session.settings, session.recipe)
        # While the connection to the worker is made there is time for it.
        threading.Thread(target=endpoint.prepare, daemon=True).start()
        return session, endpoint

    def __enter__(self) -> Eyes:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
        self._endpoint.close()

    def close(self) -> None:
        """End the connection; the next look opens another."""
        self._cluster = None
        self._stack.close()

    def _connected(self) -> Cluster:
        """Give both nodes; a recipe that was started since the last look is looked at from now on."""
        wanted = records.read_wanted(self._session.state).recipe
        if wanted and wanted != self._session.settings.recipe and self._given.loaded.sources["recipe"] != "flag":
            self._endpoint.close()
            self._session, self._endpoint = self._open()
        if self._cluster is None:
            self._cluster = self._stack.enter_context(connect(self._session.settings, lenient=True))
        return self._cluster

    def _look(self, question: Question) -> Status:
        status = status_look.look(question)
        if status.unseen:
            self.close()
        return status

    def _question(self, cluster: Cluster, wanted: dict[Role, str]) -> Question:
        session = self._session
        return Question(cluster, session.recipe, self._endpoint, session.state, wanted)

    def glance(self, ask_token: bool) -> Status:  # noqa: FBT001 - one question, asked by a watch
        """Judge whether the pair serves, whatever it was made from."""
        cluster = self._connected()
        question = self._question(cluster, {})
        return self._look(replace(question, ask_token=ask_token, patience=_GLANCE_SECONDS))

    def view(self, *, ask_token: bool = True) -> View:
        """Judge the pair by what is wanted; a node that cannot be asked makes the state unknown, not the look fail."""
        cluster = self._connected()
        session = self._session
        with ThreadPoolExecutor(1) as aside:
            surroundings = aside.submit(cluster.try_both, around.gather)
            links, errors = cluster.try_both(lambda node: link.gather(node, LOOK_SECONDS))
            known = lock.read_lock(session.lock_file, session.recipe, session.settings)
            wanted: dict[Role, str] = {}
            if known and not errors:
                deployment = Deployment(session.settings, session.recipe, known, cluster)
                specs = blueprint.build_specs(deployment, links)
                wanted = {role: spec.digest for role, spec in specs.items()}
            status = self._look(replace(self._question(cluster, wanted), ask_token=ask_token))
            found = {
                role: around.parse(raw, links[role]) for role, raw in surroundings.result()[0].items() if role in links
            }
        trends = _trends(session, status, found)
        return View(status, decide_parameters(session.settings, session.recipe).context, found, trends)


def _trends(session: Session, status: Status, found: dict[Role, AroundFacts]) -> dict[Role, Trend]:
    head = status.facts["head"].of_rank(0) if "head" in status.facts else None
    if head is None or not head.is_running:
        return {}
    memory = {role: facts.memory for role, facts in status.facts.items() if role in found}
    seen = {role: found[role] for role in memory}
    return around.remember(session.state / "trend.json", head.run, memory, seen)


def look(session: Session) -> View:
    """Look at the pair once."""
    with Eyes(session) as eyes:
        return eyes.view()


def looks(session: Session, seconds: float) -> Iterator[View]:
    """Look at the pair every so many seconds until somebody ends it; an idle engine is rarely asked for a token."""
    asked_at = float("-inf")
    with Eyes(session) as eyes:
        while True:
            begun = time.monotonic()
            ask_token = begun - asked_at >= _TOKEN_SECONDS
            asked_at = begun if ask_token else asked_at
            yield eyes.view(ask_token=ask_token)
            time.sleep(max(0.0, begun + seconds - time.monotonic()))


# -- the supervisor ---------------------------------------------------------------------------------------------------


def watch(session: Session, *, dry_run: bool = False) -> Iterator[Event]:
    """Look every second; restart the pair when both nodes show that it is broken and its owner wants it to serve.

    A dry run looks the same, also beside a watch; it restarts nothing, keeps no event and calls no command.
    """
    state = session.state
    held = nullcontext() if dry_run else pair_lock(state / "watch", session.command)
    with held, Eyes(session) as eyes:

        def restart() -> str:
            eyes.close()
            run = following(session)
            last = records.last_answered(records.read_records(state / "runs"))
            # What the owner's start left out would keep the pair down for ever.
            run.skip_checks = records.skipped_checks(last)
            run.is_wanted = lambda: records.read_wanted(state).serving
            try:
                applied = lifecycle.restart(run, records.pair_of(last)).report.applied
            except Interrupted:
                if run.is_wanted():
                    raise
                message = "the pair was stopped while it was restarted"
                raise SparkserveError(
                    "stopped_meanwhile", message, "sparkserve start", exit_code=EXIT_NOT_READY
                ) from None
            return applied[-1].proof if applied else "it serves already"

        yield from Watch(
            look=eyes.glance,
            restart=None if dry_run else restart,
            wanted=lambda: records.read_wanted(state),
            busy=lambda: bool(lock_holder(state)),
            journal=Journal(Path(os.devnull)) if dry_run else journal(session),
            restarts_per_hour=session.settings.restarts_per_hour,
        ).run()


def journal(session: Session) -> Journal:
    """Open the events of all watches."""
    return Journal(session.state / "events.jsonl", session.settings.watch_command)


# -- stop, logs, history ----------------------------------------------------------------------------------------------


def stop(session: Session, *, force: bool, dry_run: bool) -> Outcome:
    """End both ranks and prove on each node that nothing of ours is left."""
    begun = time.monotonic()
    with connect(session.settings, lenient=True) as cluster, ExitStack() as held:
        left: dict[Role, SparkserveError] = {}
        if not dry_run:
            _take_over(session, held)
            left = cluster.try_both(remove_readers)[1]
        facts, _ = cluster.try_both(engine.gather)
        needed = session.recipe.memory.required_gib
        secrets = secrets_to_mask(session.settings)
        stopping = Stopping(session.state / "runs", force=force, needed_gib=needed, secrets=secrets)
        wanted = Plan(tuple(engine.plan_stop(cluster, facts, stopping)))
        report = ApplyReport()
        if not (dry_run or wanted.is_empty):
            report = apply(wanted, held.enter_context(session.voice.reporter(wanted)))
    report.raise_failures()
    if left:
        raise Failures(list(left.values()))
    return Outcome(("stop",), wanted, report, time.monotonic() - begun)


def _take_over(session: Session, held: ExitStack) -> None:
    """Note that the pair is not to serve and take the lock; what is refused changes nothing.

    A watch must not bring back what is being ended: one that restarts the pair just now sees the note and gives way.
    """
    before = records.read_wanted(session.state)
    lifecycle.note_down(session, lambda: records.keep_wanted(session.state, serving=False))
    patience = _GIVE_WAY_SECONDS if "`sparkserve watch`" in lock_holder(session.state) else 0.3
    lock = pair_lock(session.state, session.command, patience)
    try:
        lifecycle.note_down(session, lambda: held.enter_context(lock))
    except (SparkserveError, KeyboardInterrupt):
        lifecycle.note_down(session, lambda: records.keep_wanted(session.state, **asdict(before)))
        raise


def read_logs(session: Session, query: LogQuery, run: str = "") -> Iterator[LogLine]:
    """Give both ranks' log lines in the order of time: of the containers, or those kept of an earlier run."""
    if run:
        yield from engine_logs.read_saved(session.state / "runs", run, query)
        return
    with connect(session.settings) as cluster:
        yield from engine_logs.read_logs(cluster, query)


def history(session: Session) -> list[Record]:
    """List the starts that were recorded, newest first; what is under way holds the lock."""
    found = records.read_records(session.state / "runs")
    for one in found[1:] if lock_holder(session.state) else found:
        one.ending = "killed" if one.ending == "under way" else one.ending
    return found


# -- the cable --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cable:
    """The cable as it is: both nodes' names and facts, where SSH goes, what is not in order, what else it could be."""

    names: dict[Role, str]
    links: dict[Role, link.LinkFacts]
    management: dict[Role, link.Management]
    odd: list[Check]
    proposals: list[link.Proposal]
    checks: list[Check]


def see_cable(session: Session, *, floor: float | None = None) -> Cable:
    """Look at the cable; with a floor, in Gb/s, prove it as well."""
    with connect(session.settings) as cluster:
        links = cluster.on_both(link.gather)
        names = cluster.on_both(lambda node: str(node.identity["hostname"]))
        checks = prove_cable(session, cluster, links, floor) if floor is not None else []
    odd = [check for check in check_link(Subject(session.settings, session.recipe, {}, links)) if check.verdict != "ok"]
    file = str(session.loaded.env_file)
    odd, checks = (
        [replace(check, hint=with_settings_file(check.advice, file)) for check in found] for found in (odd, checks)
    )
    return Cable(names, links, link.find_management(links), odd, link.propose(links), checks)


def prove_cable(session: Session, cluster: Cluster, links: dict[Role, link.LinkFacts], floor: float) -> list[Check]:
    """Prove the cable as far as both nodes answer; what would disturb a pair that works for somebody is left out."""

    def is_idle() -> bool:
        with suppress(SparkserveError), closing(open_endpoint(session.settings, session.recipe)) as endpoint:
            question = Question(cluster, session.recipe, endpoint, session.state, ask_token=False)
            evidence = status_look.look(replace(question, patience=_GLANCE_SECONDS, remembers=False)).evidence
            return bool(evidence.samples) and not evidence.in_flight
        return False  # what cannot be asked may be at work

    port = decide_ports(session.settings, session.recipe).master
    return link_proof.prove(cluster, links, master_port=port, floor=floor, is_idle=is_idle)
