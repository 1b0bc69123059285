"""Tokens per second of training. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Throughput:
    """Tokens per second of training; time inside `paused()` does not count."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tokens = 0
        self._seconds = 0.0  # up to the last pause
        self._running_since: float | None = clock()

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude what happens inside, such as validation or a checkpoint. Pauses do not nest."""
        assert self._running_since is not None, "already paused"
        self._seconds += self._clock() - self._running_since
        self._running_since = None
        try:
            yield
        finally:
            self._running_since = self._clock()

    def read(self) -> float:
        """Tokens per second since the last call; starts a new interval."""
        now = self._clock()
        if self._running_since is not None:
            self._seconds += now - self._running_since
            self._running_since = now
        rate = self._tokens / self._seconds if self._seconds > 0 else 0.0
        self._tokens, self._seconds = 0, 0.0
        return rate
