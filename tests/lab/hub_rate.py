"""A token bucket that many connections draw from."""

import threading
import time
from collections.abc import Callable

QUANTUM_SECONDS = 0.01
BURST_SECONDS = 0.05
LARGEST_SHARE = 4 << 20


class RateLimit:
    """Hands out bytes at a rate that may change at any moment; None means without limit."""

    def __init__(self, rate: Callable[[], float | None]) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._level = 0.0
        self._filled = time.monotonic()

    def take(self, wanted: int) -> int:
        """Wait until something may be sent and return how many bytes (at least 1, at most `wanted`)."""
        while True:
            with self._lock:
                rate = self._rate()
                share = min(wanted, LARGEST_SHARE)
                if rate is None:
                    return share
                share = min(share, max(1, int(rate * QUANTUM_SECONDS)))
                self._fill(rate)
                if self._level >= share:
                    self._level -= share
                    return share
                pause = (share - self._level) / rate
            time.sleep(min(pause, BURST_SECONDS))

    def _fill(self, rate: float) -> None:
        """Add what the time since the last look is worth; an idle time is worth one burst at most."""
        now = time.monotonic()
        self._level = min(self._level + (now - self._filled) * rate, max(1.0, rate * BURST_SECONDS))
        self._filled = now
