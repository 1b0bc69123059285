"""Read the files of a run folder that a report needs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spurline.run_folders import is_numbered
from spurline.train.folder_lock import is_owned
from spurline.train.metrics.expert_load_file import EXPERT_LOAD_FILE, ExpertLoads
from spurline.untrusted import lines, open_regular, parse_json, read_json, reason

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    name: str
    records: list[Record]
    """The lines of metrics.jsonl in step order, with expert loads as arrays."""
    config: Record
    """config.json, or empty."""
    samples: list[Record]
    """Lines with `step` and `text`."""
    is_running: bool = False
    """Whether a process is training it."""
    changed: float = 0.0
    """When the last line of metrics was written, in seconds since 1970; 0 if unknown."""

    @property
    def total_steps(self) -> int | None:
        """The number of steps in the config; None if unknown."""
        training = self.config.get("training")
        steps = training.get("steps") if isinstance(training, dict) else None
        return steps if is_step(steps) else None

    @property
    def state(self) -> str:
        """running, finished, or stopped before its last step; empty if unknown."""
        if self.is_running:
            return "running"
        if self.total_steps is None:
            return ""
        return "finished" if self.records[-1]["step"] >= self.total_steps else "stopped"


def read_runs(folders: list[str]) -> list[Run]:
    """Read the runs in `folders`, named by folder name (a numbered run by its parent too), or by path if not unique."""
    paths = [Path(folder) for folder in folders]
    names = [_name(path.resolve()) for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"the same run is given twice: {' '.join(folders)}")
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def _name(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}" if is_numbered(folder) else folder.name


def read_run(folder: Path, name: str) -> Run:
    metrics = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such run folder")
    if not metrics.is_file():
        raise ValueError(f"{folder}: not the folder of a run, as there is no metrics.jsonl in it")
    by_step = {}
    has_load_file = False
    for where, record in _objects(metrics):
        if not is_step(record.get("step")):
            raise ValueError(f"{where}: a line of metrics needs its step")
        has_load_file = has_load_file or record.get("expert_load") == EXPERT_LOAD_FILE
        by_step[record["step"]] = cleaned(record)
    if not by_step:
        raise ValueError(f"{metrics}: no step was written yet")
    if has_load_file and (folder / EXPERT_LOAD_FILE).exists():
        loads = ExpertLoads(folder / EXPERT_LOAD_FILE)
        for place, step in enumerate(loads.step_N.tolist()):
            if step in by_step:
                by_step[step]["expert_load"] = loads.of_record(place)
    samples = []
    for where, sample in _objects(folder / "samples.jsonl"):
        if type(sample.get("step")) is not int or type(sample.get("text")) is not str:
            raise ValueError(f"{where}: a sample needs its step and text")
        samples.append({"step": sample["step"], "text": sample["text"]})
    return Run(
        name,
        [by_step[step] for step in sorted(by_step)],
        _read_config(folder / "config.json"),
        samples,
        is_owned(folder),
        metrics.stat().st_mtime,
    )


def cleaned(record: Record) -> Record:
    """The fields of a record that have the types of metrics, with expert loads as compact arrays."""
    found: Record = {}
    for name, value in record.items():
        if name == "expert_load":
            loads = value.items() if isinstance(value, dict) else ()
            found[name] = {layer: array for layer, rows in loads if (array := _counts(rows)) is not None}
        elif name == "warnings":
            found[name] = [str(line) for line in value] if isinstance(value, list) else []
        elif name in ("routing", "step_time_parts"):
            found[name] = _numbers(value, depth=2) if isinstance(value, dict) else {}
        elif value is None or is_number(value):
            found[name] = value
        elif isinstance(value, dict):
            found[name] = _numbers(value, depth=2)
    return found


def _numbers(values: Record, depth: int) -> Record:
    """The numbers in a dict and in its nested dicts."""
    inner = {name: _numbers(value, depth - 1) for name, value in values.items() if depth and isinstance(value, dict)}
    return {name: value for name, value in values.items() if is_number(value)} | inner


def is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def is_number(value: Any) -> bool:
    """Whether `value` is a number small enough that sums can't overflow."""
    return type(value) in (int, float) and abs(value) < 1e100


def _counts(rows: Any) -> npt.NDArray[Any] | None:
    """The row counts of the experts as an array; None if they are not valid counts."""
    if not isinstance(rows, list) or not rows or not set(map(type, rows)) <= {int, float}:
        return None
    try:
        counts = np.array(rows, np.float64)
    except OverflowError:
        return None
    if not ((counts >= 0) & (counts < 2**53)).all():  # also rejects NaN
        return None
    return counts.astype(np.uint32) if counts.max() < 2**32 and (counts % 1 == 0).all() else counts


def _objects(path: Path) -> Iterator[tuple[str, Record]]:
    """Each line's location and content; none if there is no file. A truncated last line is skipped."""
    if not path.exists():
        return
    try:
        with open_regular(path) as file:
            for number, line in enumerate(lines(file), 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    try:
                        content = parse_json(line.decode("utf-8", "replace").rstrip())
                    except ValueError as error:
                        if not line.endswith(b"\n"):  # the run was killed while writing, or is writing now
                            return
                        raise ValueError(f"{where}: {str(error).replace('line 1, ', '')}") from None
                    if not isinstance(content, dict):
                        raise ValueError(f"{where}: not a JSON object")
                    yield where, content
    except OSError as error:
        raise ValueError(f"{path}: {reason(error)}") from None


def _read_config(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        content = read_json(path)
    except OSError as error:
        raise ValueError(f"{path}: {reason(error)}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content
