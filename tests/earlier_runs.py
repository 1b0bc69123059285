"""Whether a command has changed a run that was there before it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from spurline.run_folders import find_run

WRITES = {"report": "report.html", "routing": "routing.html"}  # into the folder of the run


def files_of_runs() -> dict[Path, str]:
    """The checksum of each file of every run below the working directory."""
    runs = {path.parent for path in Path().rglob("config.json")}
    files = {path for run in runs for path in run.rglob("*") if path.is_file() and not path.is_symlink()}
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_to_resume(arguments: list[str]) -> Path | None:
    return find_run(arguments[arguments.index("--job.resume") + 1]) if "--job.resume" in arguments else None


def changes(arguments: list[str], resumed: Path | None, before: dict[Path, str]) -> tuple[set[Path], set[Path]]:
    """Files of earlier runs that `spurline ARGUMENTS` has changed: those that are its own to change, and all others.

    Its own are those of a run that it has resumed, and the page that it is asked to write. `before` has the files
    of all runs so far.
    """
    after = files_of_runs()
    changed = {path for path in before if after.get(path) != before[path]}
    own = {path for path in changed if resumed in path.parents or path.name == WRITES.get(arguments[0])}
    return own, changed - own
