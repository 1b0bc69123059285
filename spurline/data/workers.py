"""Parallel map over a long sequence on several processes, with ordered results and bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_function: Callable[[Any], Any]


def map_in_order(function: Callable[[T], R], items: Iterable[T], num_workers: int) -> Generator[R, None, None]:
    """Yield function(item) for each item, in order; with num_workers=1, in this process.

    `function` is sent to each worker once. Workers exit when the generator is closed or this process ends.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    # Not fork: library threads don't survive it, and locks they hold would stay locked.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, initializer=_start, initargs=(function,))
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_call, item))
            if len(waiting) > 2 * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError("a worker process died; if memory ran out, try again with fewer --workers") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and shuts the pool down
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(item: Any) -> Any:
    return _function(item)
