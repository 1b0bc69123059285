"""Where the metrics of a run are written: metrics.jsonl, and others if they are asked for. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, Protocol

from spurline.config import Metrics
from spurline.train.metrics.jsonl import JsonlWriter


class Writer(Protocol):
    """Anything that takes records of metrics."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class AllWriters:
    """Passes each record to several writers; metrics.jsonl is first, so that it has what another one fails on."""

    def __init__(self, writers: list[Writer]) -> None:
        self._writers = writers

    def write(self, record: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(record)

    def __enter__(self) -> AllWriters:
        return self

    def __exit__(self, *exception: object) -> None:
        with ExitStack() as stack:
            for writer in self._writers:
                stack.enter_context(closing(writer))


def open_writers(
    folder: str | os.PathLike[str],
    metrics: Metrics,
    run_config: Mapping[str, Any],
    resume_from_step: int | None = None,
    enabled: bool = True,
) -> AllWriters:
    """The writers that `metrics` selects, for the run in `folder`; none on ranks that do not write (enabled=False).

    TensorBoard is skipped if it is not installed. `run_config` is what W&B shows as the config.
    """
    if not enabled:
        return AllWriters([])
    writers: list[Writer] = []
    if metrics.wandb != "off":  # first, as it may be refused, and nothing should be written then
        from spurline.train.metrics.wandb import WandbWriter

        writers.append(WandbWriter(folder, metrics.wandb, metrics.wandb_project, run_config, resume_from_step))
    if metrics.tensorboard:
        from spurline.train.metrics import tensorboard

        if tensorboard.is_installed():
            writers.insert(0, tensorboard.TensorBoardWriter(folder, resume_from_step))
    return AllWriters([JsonlWriter(folder, resume_from_step), *writers])
