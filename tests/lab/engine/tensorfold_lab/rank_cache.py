"""The rank cache: this rank's slices in one file, written at the first start and found at later ones."""

import os
from pathlib import Path

from .lifetime import EngineError

MAGIC = b"TFDSRK01"


class RankCache:
    """One rank's cache file under TF_DS_RANK_CACHE, or no cache when that is unset."""

    def __init__(self, rank: int, fingerprint: str, size: int) -> None:
        folder = os.environ.get("TF_DS_RANK_CACHE")
        self._path = Path(folder) / f"rank{rank}of2-{fingerprint[:16]}.bin" if folder else None
        self._size = size
        self._written = 0
        if self._path:
            self._partial = self._path.with_name(f".{self._path.name}.partial")

    @property
    def found(self) -> bool:
        """True if a whole cache file of these weights is there."""
        if not self._path or not self._path.is_file():
            return False
        with self._path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC

    @property
    def place(self) -> str:
        """The file's path, for the log."""
        return str(self._path or "none (TF_DS_RANK_CACHE is not set)")

    def write_up_to(self, share: float) -> None:
        """Let the unfinished file grow to this share of its size."""
        if not self._path:
            return
        try:
            with self._partial.open("ab" if self._written else "wb") as file:
                end = int(self._size * share)
                block = MAGIC if self._written == 0 else b""
                file.write(block.ljust(end - self._written, b"\x5a"))
                self._written = file.tell()
        except OSError as problem:
            raise EngineError(f"OSError: rank cache: {problem}") from problem

    def finish(self) -> None:
        """Give the whole file its name."""
        if not self._path:
            return
        with self._partial.open("ab") as file:
            os.fsync(file.fileno())
        self._partial.rename(self._path)
