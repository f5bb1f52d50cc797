"""`tensorfold serve`: one rank from its command line to its exit code."""

import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from .api_keys import read_keys
from .arguments import Settings, read_arguments
from .completions import Completions
from .composing import Composer
from .control import Control, ControlError
from .engine import Engine
from .faults import Faults
from .http_server import HttpServer
from .lane import Lane
from .lifetime import Deadline, EngineError, Lifetime, StoppedError
from .load import Loader, say_network_noise, say_opening
from .log import log, tag
from .model_files import inspect_model
from .node_memory import NodeMemory
from .rendezvous import Rendezvous


@dataclass(frozen=True)
class Rank:
    """One rank and what it runs with."""

    settings: Settings
    control: Control
    lifetime: Lifetime
    faults: Faults
    memory: NodeMemory

    def run(self) -> None:
        """Go through the start, then serve or follow until the end."""
        settings, script, started = self.settings, self.control.now, time.monotonic()
        say_opening(settings)
        keys = read_keys(settings.api_key_file)
        model = inspect_model(settings.model)
        self.faults.pass_through("before_rendezvous")
        deadline = Deadline(script.rendezvous_timeout_seconds)
        rendezvous = Rendezvous(settings, model.fingerprint, self.lifetime, deadline)
        lane = Lane(settings.rank, rendezvous.meet(), self.lifetime, script.heartbeat_seconds)
        lane.watch()
        say_network_noise()
        tables = Loader(settings, model, self.control, self.faults, self.memory, self.lifetime).load()
        lane.wait_for_other("loading", script.rendezvous_timeout_seconds)
        tag(f"DeepSeek-V4.1 engine ready: 2 rank(s), context {settings.context}, DSpark {settings.mtp_drafts} drafts")
        if settings.rank == 0:
            self._serve(lane, Composer(tables, settings.mtp_drafts, settings.context), keys, started)
        else:
            self._follow(lane, started)

    def _serve(self, lane: Lane, composer: Composer, keys: tuple[str, ...], started: float) -> None:
        settings = self.settings
        engine = Engine(lane, self.control, settings.parallel, settings.context)
        self._be_ready(lane)
        engine.start()
        server = None
        if not self.control.now.no_http:
            server = HttpServer(settings, Completions(settings, engine, composer, self.control), keys)
            threading.Thread(target=server.serve_forever, args=(0.1,), name="http", daemon=True).start()
            tag(
                f"serving {settings.name} at http://{settings.host}:{settings.port}/v1 on CUDA, rank 0 of 2 "
                f"(context {settings.context}; loaded in {time.monotonic() - started:.1f} s)"
            )
        try:
            self._stay()
        finally:
            if server:
                server.shutdown()
                server.server_close()
            lane.say_goodbye()

    def _follow(self, lane: Lane, started: float) -> None:
        tag(f"rank 1 ready in {time.monotonic() - started:.1f} s, following rank 0")
        self._be_ready(lane)
        threading.Thread(target=lane.follow, name="follow", daemon=True).start()
        self._stay()

    def _be_ready(self, lane: Lane) -> None:
        """From here on a lost rank breaks the lane, no longer the start; neither rank goes on before both are here."""
        lane.hung = lambda: self.faults.hangs("after_ready")
        self.lifetime.ready = True
        lane.wait_for_other("warm-up", self.control.now.rendezvous_timeout_seconds)

    def _stay(self) -> None:
        """Stay until the end, and crash when that is scripted: at once, with no goodbye to anybody."""
        try:
            while True:
                self.faults.say("after_ready")
                self.faults.exit_if_scripted("after_ready")
                self.lifetime.pause(0.05)
        except EngineError as crash:
            say_reason(crash)
            self.memory.give_back()
            os._exit(crash.code)


def say_reason(problem: EngineError) -> None:
    """Print why this rank ends; a scripted crash may leave no word."""
    if str(problem):
        log(str(problem))


def main() -> int:
    """Run one rank; returns its exit code."""
    settings = read_arguments(sys.argv[1:])
    lab = Path(os.environ.get("LAB_DIR", "/lab"))
    try:
        control = Control(lab / "control.json", settings.rank)
    except ControlError as problem:
        log(f"control file: {problem}")
        return 2
    lifetime = Lifetime()
    lifetime.watch_signals(lambda: control.now.ignore_sigterm)
    memory = NodeMemory(lab)
    rank = Rank(settings, control, lifetime, Faults(control, settings.rank, lifetime), memory)
    try:
        rank.run()
    except StoppedError:
        tag(f"rank {settings.rank} stopped")
    except EngineError as problem:
        say_reason(problem)
        lifetime.end(problem.code)
    finally:
        memory.give_back()
    return lifetime.code


if __name__ == "__main__":
    sys.exit(main())
