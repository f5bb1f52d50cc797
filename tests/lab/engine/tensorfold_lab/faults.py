"""The scripted places where a rank says something odd, exits, or stops making progress."""

from .control import Control, Fault, Line
from .lifetime import EngineError, Lifetime
from .log import log, tag


class Faults:
    """What the control file has in store for this rank."""

    def __init__(self, control: Control, rank: int, lifetime: Lifetime) -> None:
        self._control = control
        self._rank = rank
        self._lifetime = lifetime
        self._said: set[Line] = set()

    def pass_through(self, place: str) -> None:
        """Go through a place of the start: say its lines, then exit or hang there if that is scripted."""
        self.say(place)
        self.exit_if_scripted(place)
        if self.hangs(place):
            tag("hangs here, as scripted")
        while self.hangs(place):
            self._lifetime.pause(0.05)

    def say(self, place: str) -> None:
        """Print the scripted lines of a place, each once."""
        for line in self._control.now.log_lines:
            if line.at == place and line not in self._said:
                self._said.add(line)
                log(line.line)

    def exit_if_scripted(self, place: str) -> None:
        """Leave with the scripted lines and code, as a crash would."""
        fault = self._control.now.exit_at
        if fault is None or not self._here(fault, place):
            return
        self._lifetime.pause(fault.after_seconds)
        raise EngineError("\n".join(fault.log), fault.code)

    def hangs(self, place: str) -> bool:
        """True while this rank is scripted to hang at this place."""
        fault = self._control.now.hang_at
        return fault is not None and self._here(fault, place)

    def _here(self, fault: Fault, place: str) -> bool:
        return fault.at == place and fault.rank in {None, self._rank}
