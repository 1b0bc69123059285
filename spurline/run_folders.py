"""Run folders: numbered, as `outputs/<config>/0001`, with a link `latest` next to them. Torch-free.

Runs never share a folder. A number is claimed by creating its folder, which only one process can do, so two runs that
start at the same moment get different folders.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from spurline.remote import url_problems

LATEST = "latest"
"""The link to the run that was started or resumed last; as an option value, it means that run."""
FILES_OF_A_RUN = ("config.json", "metrics.jsonl", "checkpoints", "bad_steps.jsonl", "failures.jsonl", "samples.jsonl")
"""A folder with any of these is a run's."""


def numbered_runs(runs_folder: str | os.PathLike[str]) -> list[Path]:
    """The numbered run folders in `runs_folder`, oldest first."""
    try:
        found = [path for path in Path(runs_folder).iterdir() if is_numbered(path) and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name))


def claim_number(runs_folder: str | os.PathLike[str]) -> Path:
    """Create the folder of a new run with the next number, which no other run can then claim."""
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
    """The run that `latest` points to, or the one with the highest number if there is no such link."""
    runs = Path(runs_folder)
    with contextlib.suppress(OSError):
        named = runs / os.readlink(runs / LATEST)
        if named.is_dir():
            return named
    there = numbered_runs(runs)
    return there[-1] if there else None


def set_latest(run: Path) -> None:
    """Point `latest` at a run, if it is a numbered one; does nothing on a file system without links."""
    if not is_numbered(run):
        return
    temporary = run.with_name(f".{LATEST}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        os.symlink(run.name, temporary)
        os.replace(temporary, run.with_name(LATEST))
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def find_run(path: str | os.PathLike[str]) -> Path:
    """The run that a path refers to: a run folder, or the latest run in a folder of numbered runs.

    A one-line ValueError for a URL.
    """
    if problems := url_problems("run folder", os.fspath(path)):
        raise ValueError(problems[0])
    folder = Path(path).expanduser()
    return latest_run(folder) or folder


def is_run(folder: Path) -> bool:
    """Whether a run has written to this folder."""
    return any(os.path.lexists(folder / name) for name in FILES_OF_A_RUN)


def is_numbered(folder: Path) -> bool:
    """Whether a folder has the name of a numbered run."""
    return re.fullmatch(r"[0-9]{4,9}", folder.name) is not None
