"""Do several processes see the same folder? One writes a file into it, and the others look for it. Torch-free."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECONDS_TO_SEE = 4.0
"""How long to look for a file that another process has written: network file systems may show it late."""


@contextmanager
def token_in(folder: Path) -> Iterator[str]:
    """The name of a new file in a folder, which is created if needed; both are removed, the folder if it is empty."""
    missing = missing_folders(folder)
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / f".seen-by-all-{secrets.token_hex(8)}"
    try:
        token.touch()
        yield token.name
    finally:
        token.unlink(missing_ok=True)
        remove_if_empty(missing)


def sees(token: Path, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Whether this process finds the file within SECONDS_TO_SEE and may write next to it."""
    deadline = time.monotonic() + SECONDS_TO_SEE
    while True:
        for parent in reversed(token.parents):
            # Listing a folder makes a network file system forget that a file did not exist.
            with contextlib.suppress(OSError), os.scandir(parent) as entries:
                next(entries, None)
        if token.exists():
            return os.access(token.parent, os.W_OK | os.X_OK)
        if time.monotonic() > deadline:
            return False
        sleep(0.2)


def not_shared(blind: str, folder: Path, owner: str) -> str:
    """The error for processes, named by `blind`, that don't see what `owner` has written to the folder."""
    return (
        f"{blind} can't see the run folder {folder} that {owner} has made, or can't write to it: choose a"
        " --job.dump_folder on a disk that all nodes share, and start all ranks in the same working directory"
    )


def missing_folders(folder: Path) -> list[Path]:
    """The folders that must be created for this one, itself first."""
    absolute = folder.absolute()
    return [path for path in (absolute, *absolute.parents) if not os.path.lexists(path)]


def remove_if_empty(folders: list[Path]) -> None:
    """Remove folders, the innermost first, that hold nothing."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
