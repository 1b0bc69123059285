"""Metrics as JSON lines, in `<run>/metrics.jsonl`. Free of torch."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from spurline.files import append, publish, temporary_name
from spurline.train.metrics.expert_load_file import EXPERT_LOAD_FILE, LARGE, ExpertLoadWriter
from spurline.untrusted import lines, open_regular, parse_json

_TAIL_BYTES = 2**20
_STEP = re.compile(rb'\{"step": (\d{1,18})[,}]')


class JsonlWriter:
    """Writes one JSON object per line to `<folder>/metrics.jsonl`, readable by others as soon as `write` returns.

    Starts a new file or, with `resume_from_step=n`, appends to the lines of steps up to n; later lines are dropped, as
    the resumed run writes them again. An `expert_load` of many experts goes to a file of its own, which the line names.
    A write that fails leaves no part of its line behind.
    """

    def __init__(
        self, folder: str | os.PathLike[str], resume_from_step: int | None = None, enabled: bool = True
    ) -> None:
        self.path = Path(folder) / "metrics.jsonl"
        self._file: IO[bytes] | None = None
        if not enabled:  # ranks other than the first
            return
        if resume_from_step is not None and self.path.exists():
            drop_lines_after(self.path, resume_from_step)
        mode = "wb" if resume_from_step is None else "ab"
        self._file = open(self.path, mode, buffering=0)  # noqa: SIM115
        self._expert_load = ExpertLoadWriter(folder, resume_from_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`, which must have a `step`; numbers that are not finite become null, as JSON has none."""
        assert "step" in record, "a line of metrics needs its step"
        if self._file is None:
            return
        loads = record.get("expert_load") or {}
        if sum(map(len, loads.values())) > LARGE:
            self._expert_load.write(record["step"], loads)
            record = {**record, "expert_load": EXPERT_LOAD_FILE}
        line = {"step": record["step"], **record}  # first, so that it is found without parsing the line
        append(self._file, (json.dumps(_to_json(line), allow_nan=False) + "\n").encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._expert_load.close()

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


def drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines of steps up to `step`, reading one line at a time.

    Nearly always the lines to drop are the last ones, and the file is truncated there, which needs no disk space.
    """
    kept_bytes, last_kept_end, position = 0, 0, 0
    last_kept = b"\n"
    try:
        with open_regular(path) as file:
            for line in lines(file):
                position += len(line)
                if _step_of(line) <= step:
                    kept_bytes, last_kept_end, last_kept = kept_bytes + len(line), position, line
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. Remove that line to resume the run") from None
    if kept_bytes == last_kept_end:
        os.truncate(path, kept_bytes)
        if not last_kept.endswith(b"\n"):
            with open(path, "ab") as kept:
                kept.write(b"\n")
        return
    temporary = temporary_name(path)
    try:
        with open_regular(path) as file, open(temporary, "wb") as kept:
            kept.writelines(line.rstrip(b"\n") + b"\n" for line in lines(file) if _step_of(line) <= step)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def last_step(path: Path) -> int:
    """The step of the last line that is complete; 0 if there is none."""
    try:
        with open_regular(path) as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - _TAIL_BYTES))
            steps = [_step_of(line) for line in file.read().splitlines(keepends=True)]
    except OSError:
        return 0
    return int(next((step for step in reversed(steps) if step < math.inf), 0))


def _step_of(line: bytes) -> float:
    """The step of a line; infinity for a line that was cut off when the run was killed."""
    if (found := _STEP.match(line)) and line.endswith(b"}\n"):
        return int(found[1])
    try:
        return int(parse_json(line)["step"])
    except (ValueError, TypeError, KeyError, OverflowError):
        return math.inf
