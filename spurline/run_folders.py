"""Where runs are: a numbered folder each, `outputs/<config>/0001`, and a link `latest` beside them. Free of torch.

A run has its folder alone. The number is claimed by making the folder, which one process alone can do, so two runs that
start at the same moment have two folders.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

LATEST = "latest"
"""The link to the run that was started or resumed last; as an option, that run."""
FILES_OF_A_RUN = ("config.json", "metrics.jsonl", "checkpoints", "bad_steps.jsonl", "failures.jsonl", "samples.jsonl")
"""What shows that a folder is that of a run."""


def numbered_runs(runs_folder: str | os.PathLike[str]) -> list[Path]:
    """The numbered folders in it, the oldest first."""
    try:
        found = [path for path in Path(runs_folder).iterdir() if is_numbered(path) and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name))


def claim_number(runs_folder: str | os.PathLike[str]) -> Path:
    """Make the folder of a new run: the next number, which no other run can have any more."""
    runs = Path(runs_folder)
    runs.mkdir(parents=True, exist_ok=True)
    there = numbered_runs(runs)
    number = int(there[-1].name) if there else 0
    while True:
        number += 1
        with contextlib.suppress(FileExistsError):
            (runs / f"{number:04d}").mkdir()
            return runs / f"{number:04d}"


def latest_run(runs_folder: str | os.PathLike[str]) -> Path | None:
    """The run that `latest` names; the one with the highest number where there is no such link."""
    runs = Path(runs_folder)
    with contextlib.suppress(OSError):
        named = runs / os.readlink(runs / LATEST)
        if named.is_dir():
            return named
    there = numbered_runs(runs)
    return there[-1] if there else None


def set_latest(run: Path) -> None:
    """Let `latest` name a numbered run, if it is one; a file system without links does without."""
    if not is_numbered(run):
        return
    temporary = run.with_name(f".{LATEST}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        os.symlink(run.name, temporary)
        os.replace(temporary, run.with_name(LATEST))
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def find_run(path: str | os.PathLike[str]) -> Path:
    """The run that a path names: its folder, or a folder of numbered runs, whose latest is meant."""
    folder = Path(path).expanduser()
    return latest_run(folder) or folder


def is_run(folder: Path) -> bool:
    """Whether a run has written to this folder."""
    return any(os.path.lexists(folder / name) for name in FILES_OF_A_RUN)


def is_numbered(folder: Path) -> bool:
    """Whether a folder has the name of a numbered run."""
    return re.fullmatch(r"[0-9]{4,9}", folder.name) is not None
