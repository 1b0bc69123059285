"""What a run folder holds, as far as a report is concerned. Free of torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Run:
    name: str
    records: list[Record]
    """The lines of metrics.jsonl, in the order of their steps."""
    config: Record
    """config.json, or nothing."""
    samples: list[Record]
    """Lines with `step` and `text`."""

    @property
    def total_steps(self) -> int | None:
        """As many as the run was meant to take."""
        steps = (self.config.get("training") or {}).get("steps")
        return steps if isinstance(steps, int) else None


def read_runs(folders: list[str]) -> list[Run]:
    """The runs in `folders`, each by the shortest name that tells it from the others."""
    paths = [Path(folder) for folder in folders]
    names = [path.resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(f"the same run is given twice: {' '.join(folders)}")
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(folder: Path, name: str) -> Run:
    metrics = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such run folder")
    if not metrics.is_file():
        raise ValueError(f"{folder}: not the folder of a run, as there is no metrics.jsonl in it")
    by_step = {}
    for where, record in _objects(metrics):
        if type(record.get("step")) is not int:
            raise ValueError(f"{where}: a line of metrics needs its step")
        by_step[record["step"]] = record
    if not by_step:
        raise ValueError(f"{metrics}: no step was written yet")
    samples = []
    for where, sample in _objects(folder / "samples.jsonl"):
        if type(sample.get("step")) is not int or type(sample.get("text")) is not str:
            raise ValueError(f"{where}: a sample needs its step and text")
        samples.append(sample)
    return Run(name, [by_step[step] for step in sorted(by_step)], _read_config(folder / "config.json"), samples)


def _objects(path: Path) -> Iterator[tuple[str, Record]]:
    """Each line's place and content; none if there is no file. A last line that was cut short doesn't count."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                content = json.loads(line)
            except json.JSONDecodeError as error:
                if not line.endswith("\n"):  # the run was killed while it wrote, or writes right now
                    return
                raise ValueError(f"{where}: not JSON: {error.msg}") from None
            if not isinstance(content, dict):
                raise ValueError(f"{where}: not a JSON object")
            yield where, content


def _read_config(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content
