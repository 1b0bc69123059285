"""Where the metrics of a run are written: metrics.jsonl, and others if they are asked for. Free of torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, closing
from typing import Any, Protocol

from spurline.config import Metrics
from spurline.train.metrics.jsonl import JsonlWriter


class Writer(Protocol):
    """Anything that takes lines of metrics."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class AllWriters:
    """Hands each line to several writers; metrics.jsonl comes first, so that it has what another one trips over."""

    def __init__(self, writers: list[Writer]) -> None:
        self._writers = writers

    def write(self, record: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(record)

    def __enter__(self) -> AllWriters:
        return self

    def __exit__(self, *exception: object) -> None:
        with ExitStack() as all_of_them:
            for writer in self._writers:
                all_of_them.enter_context(closing(writer))


def open_writers(
    folder: str | os.PathLike[str],
    metrics: Metrics,
    run_config: Mapping[str, Any],
    resume_from_step: int | None = None,
    enabled: bool = True,
) -> AllWriters:
    """Those that `metrics` asks for, for the run in `folder`; none on ranks that don't write (enabled=False).

    TensorBoard is left out where it isn't installed. `run_config` is what W&B shows as the config.
    """
    if not enabled:
        return AllWriters([])
    writers: list[Writer] = []
    if metrics.wandb != "off":  # first, as this is the one that may be refused
        from spurline.train.metrics.wandb import WandbWriter

        writers.append(WandbWriter(folder, metrics.wandb, metrics.wandb_project, run_config, resume_from_step))
    if metrics.tensorboard:
        from spurline.train.metrics import tensorboard

        if tensorboard.is_installed():
            writers.insert(0, tensorboard.TensorBoardWriter(folder, resume_from_step))
    return AllWriters([JsonlWriter(folder, resume_from_step), *writers])
