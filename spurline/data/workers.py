"""A function over a long sequence on several processes, with results in order and few of them in memory."""

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
    """function(item) for each item, in order; `function` goes to each worker once. One worker is this process itself.

    Closing the generator ends the workers, and so does the end of this process, whatever ends it.
    """
    if num_workers == 1:
        yield from map(function, items)
        return
    # Threads of the libraries that are loaded here don't survive a fork, and neither may the locks they hold.
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
        raise ValueError(
            "a worker process ended before its time; if memory ran out, try again with fewer --workers"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends us in order
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(item: Any) -> Any:
    return _function(item)
