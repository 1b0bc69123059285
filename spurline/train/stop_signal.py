"""Stop a run cleanly when a signal asks for it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from spurline.train.launcher import is_launched

# SIGTERM: schedulers and torchrun. SIGINT: Ctrl-C. SIGHUP: a closed terminal. SIGUSR1: notices of preemption.
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
STOP_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class StopSignal:
    """Within this context, the first of these signals is only noted; a second one ends the process immediately.

    A signal that was ignored before (SIGHUP under nohup) stays ignored. With several ranks, the second one is ignored:
    Slurm sends a signal to all processes of a job, and the launcher sends it again; the launcher also ends the ranks
    when it receives a second one itself.
    """

    def __init__(self, answer: str = "") -> None:
        """`answer` is written to stderr when the first signal comes, with its name in front."""
        self._answer = answer
        self.received = 0
        """The number of the signal; 0 if there was none."""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.received != 0

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # Python allows signal handlers in no other thread
            for number in STOP_SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.requested and is_launched():
            return  # signals stay ignored: the first rank to end must not end those that still write
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for handled in self._before:
            signal.signal(handled, signal.SIG_IGN if is_launched() else signal.SIG_DFL)
        if self._answer:
            # Not by print, which the signal may have interrupted.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{signal.Signals(number).name} received: {self._answer}\n".encode())
