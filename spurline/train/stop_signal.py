"""Stop a run cleanly on SIGTERM."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class StopSignal:
    """Within this context, the first SIGTERM only sets `requested`; a second one ends the process immediately."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers in no other thread
            self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(number, signal.SIG_DFL)
