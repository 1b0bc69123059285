"""Metrics as JSON lines, in `<run>/metrics.jsonl`. Free of torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from spurline.files import write_file


class JsonlWriter:
    """Writes one JSON object per line to `<folder>/metrics.jsonl`, readable by others as soon as `write` returns.

    Starts a new file or, with `resume_from_step=n`, appends to the lines of steps up to n; later lines are dropped, as
    the resumed run writes them again.
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
        """Append `record`, which must have a `step`; numbers that are not finite become null, as JSON has none."""
        assert "step" in record, "a line of metrics needs its step"
        if self._file is not None:
            self._file.write(json.dumps(_to_json(record), allow_nan=False) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


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
    """The step of a line; infinity for a line that was cut off when the run was killed."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf
