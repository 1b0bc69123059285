"""Prefetch the values of upcoming steps in a background thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")

DEPTH = 2
"""Steps to prefetch: one while the previous step computes, and one to absorb a slow value."""


class Prefetcher(Generic[T]):
    """Calls make(step) for each of `steps`, in order, at most DEPTH ahead of `get`.

    A single thread makes all calls, so `make` need not be thread-safe. If it raises, `get` raises the same for that
    step. Leaving the context waits for the call in progress and drops the rest.
    """

    def __init__(self, make: Callable[[int], T], steps: range, set_up: Callable[[], None] | None = None) -> None:
        """`set_up` is called once in the thread."""
        self._make = make
        self._steps = iter(steps)
        self._pending: deque[tuple[int, Future[T]]] = deque()
        self._thread = ThreadPoolExecutor(1, "batches", initializer=set_up)

    def __enter__(self) -> Prefetcher[T]:
        self._start(DEPTH)
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def get(self, step: int) -> T:
        """The value of a step, waiting until it is ready; call it once per step, in order."""
        expected, value = self._pending.popleft() if self._pending else (None, None)
        assert step == expected, f"asked for step {step}, but the next is {expected}"
        assert value is not None
        self._start(1)
        return value.result()

    def _start(self, count: int) -> None:
        for step in islice(self._steps, count):
            self._pending.append((step, self._thread.submit(self._make, step)))
