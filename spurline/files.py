"""Atomic writes of files and folders: readers see them complete or not at all, even after a kill. Torch-free.

Everything is written under a temporary name in the same folder, flushed to disk, and renamed. The rename is atomic on
POSIX file systems.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def write_file(path: str | os.PathLike[str], content: str) -> None:
    """Write `content` as UTF-8 with its own line endings; an existing file is replaced, or kept if writing fails."""
    temporary = temporary_name(path)
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(content)
        publish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` at the end of the block; after an error nothing is left.

    `path` is new or an empty folder. Parent folders that are missing are created, and removed again after an error.
    """
    path = Path(path).absolute()
    temporary = temporary_name(path)
    created = [parent for parent in path.parents if not parent.exists()]
    try:
        os.makedirs(temporary)
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        if path.exists():
            path.rmdir()
        publish(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        for parent in created:
            if parent.exists() and not any(parent.iterdir()):
                parent.rmdir()
        raise


def append(file: IO[bytes], data: bytes) -> None:
    """Append all of `data` to an unbuffered file, or nothing if that raises an OSError, such as a full disk."""
    end = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(data)
        while len(rest):
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(end)
        raise


def publish(temporary: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Rename a complete file or folder; both it and its new name are on disk when this returns."""
    sync(temporary)
    os.replace(temporary, path)
    sync(Path(path).absolute().parent)


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file, or the names in a folder, to disk."""
    if os.path.isdir(path) and not hasattr(os, "O_DIRECTORY"):
        return  # Windows has no way to open a folder, and does not need it
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_path(path: str | os.PathLike[str]) -> None:
    """Remove a folder with all that is in it, or a file; of a link only the link, not what it points to."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def temporary_name(path: str | os.PathLike[str]) -> Path:
    """A hidden name next to `path` that no other process uses."""
    path = Path(path)
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
