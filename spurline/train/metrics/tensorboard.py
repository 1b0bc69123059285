"""Metrics as TensorBoard event files, in `<run>/tensorboard/`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spurline.train.metrics.scalars import scalars


def is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoardWriter:
    """Takes the same records as JsonlWriter; with `resume_from_step=n`, TensorBoard discards what came after step n."""

    def __init__(self, folder: str | os.PathLike[str], resume_from_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A new run in an old folder starts over too, as metrics.jsonl does.
        first_step = (resume_from_step or 0) + 1
        self._writer: Any = SummaryWriter(str(Path(folder) / "tensorboard"), purge_step=first_step)

    def write(self, record: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        step = record["step"]
        # All numbers in one event: as an event for each, they take thirty times as long.
        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(record)]
        self._writer.file_writer.add_summary(Summary(value=numbers), step)
        for warning in record.get("warnings", ()):
            self._writer.add_text("warnings", warning, step)

    def close(self) -> None:
        self._writer.close()
