"""The node's scratch meminfo: lowered in place while weights load, given back at the end."""

import json
import re
import threading
from pathlib import Path

FIELDS = ("MemAvailable", "MemFree")
KIB_PER_GIB = 1 << 20
_FIELD = re.compile(r"^(MemAvailable|MemFree):(\s+)(\d+)(?= kB$)", re.MULTILINE)


class NodeMemory:
    """Takes memory from the scratch file and knows how much it owes.

    A note beside the file says what was taken and what was left then. A rank that was killed gives nothing back; the
    next one does, unless somebody has reset the file since.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "meminfo"
        self._note = folder / "meminfo.taken"
        self._lock = threading.Lock()
        self._taken = dict.fromkeys(FIELDS, 0)
        if self._path.exists():
            self._give_back_for_the_dead()

    def take(self, gib: float) -> None:
        """Lower both fields by this much, never below 0."""
        if not self._path.exists():
            return
        with self._lock:
            wanted = int(gib * KIB_PER_GIB)
            taken = {name: min(wanted, left) for name, left in self._read().items()}
            self._move({name: -kib for name, kib in taken.items()})
            self._taken = {name: self._taken[name] + taken.get(name, 0) for name in FIELDS}
            self._note.write_text(json.dumps({"taken": self._taken, "left": self._read()}))

    def give_back(self) -> None:
        """Raise both fields by what was taken; a second call has nothing to give."""
        with self._lock:
            if any(self._taken.values()):
                self._move(self._taken)
            self._taken = dict.fromkeys(FIELDS, 0)
            self._note.unlink(missing_ok=True)

    def _give_back_for_the_dead(self) -> None:
        if not self._note.exists():
            return
        note = json.loads(self._note.read_text())
        if note["left"] == self._read():
            self._move(note["taken"])
        self._note.unlink()

    def _read(self) -> dict[str, int]:
        return {match[1]: int(match[3]) for match in _FIELD.finditer(self._path.read_text())}

    def _move(self, change: dict[str, int]) -> None:
        def moved(match: re.Match[str]) -> str:
            value = str(int(match[3]) + change[match[1]])
            return f"{match[1]}:{value.rjust(len(match[2]) + len(match[3]))}"

        # One write over the old bytes: the file is bind-mounted, so a new file would not be seen.
        with self._path.open("r+b", buffering=0) as file:
            after = _FIELD.sub(moved, file.read().decode()).encode()
            file.seek(0)
            file.write(after)
            file.truncate(len(after))
