"""Where the metrics of a run are written: metrics.jsonl, and others if enabled. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any, Protocol

from spurline.config import Metrics
from spurline.train.metrics.jsonl import JsonlWriter


class Writer(Protocol):
    """Anything that takes records of metrics."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class AllWriters:
    """Passes each record to several writers; metrics.jsonl is first, so that it gets records on which another fails.

    A full disk, or another disk error, costs the metrics of a step but not the run: it is reported once, and again
    when writing works.
    """

    def __init__(self, writers: list[Writer], say: Callable[[str], None] = lambda line: None) -> None:
        self._writers, self._say = writers, say
        self._missing: dict[str, int] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        for writer in self._writers:
            name = type(writer).__name__.removesuffix("Writer")
            try:
                writer.write(record)
            except OSError as error:
                if name not in self._missing:
                    self._say(
                        f"warning: the {name} metrics of step {record['step']} were not written:"
                        f" {error.strerror or error}. Training continues without them"
                    )
                self._missing[name] = self._missing.get(name, 0) + 1
            else:
                if missing := self._missing.pop(name, 0):
                    self._say(f"the {name} metrics are written again; those of {missing} logged steps are missing")

    def __enter__(self) -> AllWriters:
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            with ExitStack() as stack:
                for writer in self._writers:
                    stack.enter_context(closing(writer))
        except OSError as error:
            self._say(f"warning: the last metrics were not written: {error.strerror or error}")


def open_writers(
    folder: str | os.PathLike[str],
    metrics: Metrics,
    run_config: Mapping[str, Any],
    resume_from_step: int | None = None,
    enabled: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> AllWriters:
    """The writers that `metrics` selects, for the run in `folder`; none on ranks that do not write (enabled=False).

    TensorBoard is skipped if it is not installed. `run_config` is what W&B shows as the config; `say` shows a line to
    the user.
    """
    if not enabled:
        return AllWriters([])
    writers: list[Writer] = []
    if metrics.wandb != "off":  # opened first: if it fails, nothing should have been written
        from spurline.train.metrics.wandb import WandbWriter

        writers.append(WandbWriter(folder, metrics.wandb, metrics.wandb_project, run_config, resume_from_step))
    if metrics.tensorboard:
        from spurline.train.metrics import tensorboard

        if tensorboard.is_installed():
            writers.insert(0, tensorboard.TensorBoardWriter(folder, resume_from_step))
    return AllWriters([JsonlWriter(folder, resume_from_step), *writers], say)
