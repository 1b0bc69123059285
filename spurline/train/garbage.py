"""Garbage collections between steps, on all ranks in the same step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collecting_every(interval: int) -> Iterator[Callable[[int], None]]:
    """While inside, collect garbage only where the loop calls the result with a step that `interval` divides.

    Python collects when many objects were created, at another moment on each rank, and looks at all that are alive:
    0.3 s with torch and a model, in which all other ranks wait. Here, all ranks collect at once, and objects that
    existed before are left out. With an interval of 0, Python decides as usual.
    """
    if not interval:
        yield lambda step: None
        return
    was_enabled, freezes = gc.isenabled(), gc.get_freeze_count() == 0  # what a caller has frozen stays so
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()

    def collect(step: int) -> None:
        if step % interval == 0:
            gc.collect()

    try:
        yield collect
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
