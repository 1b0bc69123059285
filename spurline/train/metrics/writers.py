"""What a run measures: the metrics.jsonl it writes, peak memory and throughput. Free of torch."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from spurline.config import Metrics
from spurline.files import write_file


class Writer(Protocol):
    """Anything that takes lines of metrics."""

    def write(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class MetricsWriter:
    """Writes one JSON object a line to `<folder>/metrics.jsonl`, readable by others as soon as `write` returns.

    Starts a new file, or with `resume_from_step=n` goes on after the lines of steps up to n and drops the later ones,
    which the resumed run writes again.
    """

    def __init__(
        self, folder: str | os.PathLike[str], resume_from_step: int | None = None, enabled: bool = True
    ) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self._file: IO[str] | None = None
        if not enabled:  # ranks other than the first
            return
        if resume_from_step is not None and self.path.exists():
            _drop_lines_after(self.path, resume_from_step)
        mode = "w" if resume_from_step is None else "a"
        self._file = open(self.path, mode, buffering=1, encoding="utf-8", newline="\n")  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`, which has a `step`; a number that isn't finite becomes null, as JSON has no word for it."""
        assert "step" in record, "a line of metrics needs its step"
        if self._file is not None:
            self._file.write(json.dumps(_to_json(record), allow_nan=False) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
    return AllWriters([MetricsWriter(folder, resume_from_step), *writers])


def _to_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if hasattr(value, "tolist"):  # tensors and arrays
        return _to_json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    write_file(path, "".join(f"{line}\n" for line in lines if _step_of(line) <= step))


def _step_of(line: str) -> float:
    """The step of a line; infinite, later than any, for one that a kill cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


class Throughput:
    """Tokens per second of training: the clock stands still inside `paused()`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._tokens = 0
        self._seconds = 0.0  # up to the last pause
        self._running_since: float | None = clock()

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what happens inside: validation, a checkpoint. Pauses don't nest."""
        assert self._running_since is not None, "already paused"
        self._seconds += self._clock() - self._running_since
        self._running_since = None
        try:
            yield
        finally:
            self._running_since = self._clock()

    def read(self) -> float:
        """Tokens per second since the last reading, and start anew."""
        now = self._clock()
        if self._running_since is not None:
            self._seconds += now - self._running_since
            self._running_since = now
        rate = self._tokens / self._seconds if self._seconds > 0 else 0.0
        self._tokens, self._seconds = 0, 0.0
        return rate
