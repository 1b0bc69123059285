"""When a checkpoint is due by the time since the last one. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable


class SaveClock:
    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        """With 0 minutes, a checkpoint is never due."""
        self._seconds, self._now = minutes * 60, now
        self._last = now()

    def rings(self) -> bool:
        """Whether a checkpoint is due; True only once, as ranks learn of it at the next step, and save then."""
        is_time = bool(self._seconds) and self._now() - self._last >= self._seconds
        if is_time:
            self.restart()
        return is_time

    def restart(self) -> None:
        self._last = self._now()
