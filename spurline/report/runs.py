"""Find runs in folders, read their status, and compare two. Torch-free."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spurline.report.read import is_number, is_step
from spurline.run_folders import is_run, numbered_runs
from spurline.train.folder_lock import is_owned
from spurline.train.run_state import STATE_FILE
from spurline.typed_json import flattened
from spurline.untrusted import lines, open_regular, parse_json, printable, read_json

MAX_DEPTH = 4
"""How many levels below a folder to search for runs: outputs/<config>/<number>, and one more."""
MAX_WHY = 300
"""The most characters of the reason why a run has failed."""
Record = dict[str, Any]


@dataclass(frozen=True)
class RunStatus:
    """The status of a run, from its files."""

    folder: str
    state: str
    """running, finished, stopped or failed; converted if the folder holds an imported model that was never trained."""
    step: int
    steps: int | None
    """The number of steps in its config."""
    loss: float | None
    validation_loss: float | None
    bits_per_byte: float | None
    when: str
    """When it last wrote metrics."""
    why: str
    """Why it failed."""


def find_runs(folder: Path) -> list[Path]:
    """The run folders in `folder`, which may be one itself; the most recently written comes first."""
    found = [path for path in _folders(folder, MAX_DEPTH) if is_run(path) and (path / "config.json").is_file()]
    return sorted(found, key=_time, reverse=True)


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    yield folder
    if depth == 0 or ((folder / "config.json").is_file() and not numbered_runs(folder)):
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
            yield from _folders(Path(entry.path), depth - 1)


def status_of(run: Path) -> RunStatus:
    records = read_records(run)
    config = read_object(run / "config.json")
    section = config.get("training")
    configured = section.get("steps") if isinstance(section, dict) else None
    steps = configured if is_step(configured) else None
    step = max(records, default=0)
    state, why = _state(run, step, steps, bool(records))
    return RunStatus(
        folder=str(run),
        state=state,
        step=step,
        steps=steps,
        loss=_last(records, "loss"),
        validation_loss=_last(records, "validation_loss"),
        bits_per_byte=_last(records, "bits_per_byte"),
        when=time.strftime("%Y-%m-%d %H:%M", time.localtime(_time(run))),
        why=why,
    )


def _state(run: Path, step: int, steps: int | None, has_metrics: bool) -> tuple[str, str]:
    if is_owned(run):
        return "running", ""
    stored = read_object(run / STATE_FILE)
    if stored.get("state") in ("finished", "stopped", "failed"):
        return stored["state"], printable(str(stored.get("why", "")), MAX_WHY)
    if not has_metrics:
        return (
            ("converted", "") if (run / "checkpoints" / "step-00000000").is_dir() else ("failed", "no step was taken")
        )
    return ("finished", "") if steps is not None and step >= steps else ("failed", "it was killed")


def read_records(run: Path) -> dict[int, Record]:
    """The numbers in the lines of metrics.jsonl by step; invalid lines are skipped."""
    found: dict[int, Record] = {}
    try:
        with open_regular(run / "metrics.jsonl") as file:
            for line in lines(file):
                record = _parsed(line)
                if is_step(record.get("step")):
                    found[record["step"]] = {name: value for name, value in record.items() if is_number(value)}
    except (OSError, ValueError):
        return found
    return found


def _parsed(line: bytes) -> Record:
    try:
        content = parse_json(line)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def read_object(path: Path) -> Record:
    """The object in a JSON file; empty if there is no valid one."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def changed_options(first: Path, second: Path) -> list[tuple[str, Any, Any]]:
    """The options in which two runs differ, with both values, except for folders and the recorded environment."""
    one, other = (flattened(read_object(run / "config.json")) for run in (first, second))
    names = [name for name in dict.fromkeys((*one, *other)) if not name.startswith(("environment.", "job."))]
    return [(name, one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)]


def common_steps(first: Path, second: Path, most: int = 12) -> list[tuple[int, Record, Record]]:
    """Records of steps that both runs have written, evenly spaced, including the last."""
    one, other = read_records(first), read_records(second)
    steps = sorted(one.keys() & other.keys())
    if len(steps) > most:
        steps = sorted({steps[round(i * (len(steps) - 1) / (most - 1))] for i in range(most)})
    return [(step, one[step], other[step]) for step in steps]


def _last(records: dict[int, Record], name: str) -> float | None:
    """The newest value of a metric."""
    return next((float(records[step][name]) for step in sorted(records, reverse=True) if name in records[step]), None)


def _time(run: Path) -> float:
    for name in ("metrics.jsonl", "config.json"):
        try:
            return (run / name).stat().st_mtime
        except OSError:
            continue
    return 0.0
