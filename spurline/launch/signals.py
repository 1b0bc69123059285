"""Signals to the launcher, raised as torchrun's own exception, which its agent forwards to the ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from torch.distributed.elastic.multiprocessing import SignalException

from spurline.train.stop_signal import STOP_SIGNALS

HANDLED = (*STOP_SIGNALS, *([signal.SIGQUIT] if hasattr(signal, "SIGQUIT") else []))


class Signals:
    """Within this context, signals raise a SignalException; signals that were ignored before (nohup) stay ignored."""

    def __enter__(self) -> Signals:
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # torchrun's agent must not replace these handlers
        self._noted: list[int] = []
        self._is_deferring = False
        heard = [number for number in HANDLED if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._hear) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals while ranks are being started, until they can be forwarded to the ranks."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        if self._noted:
            self._raise(self._noted.pop())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._is_deferring:
            self._noted.append(number)
        else:
            self._raise(number)

    @staticmethod
    def _raise(number: int) -> None:
        name = signal.Signals(number)
        raise SignalException(f"{name.name} received", sigval=name)
