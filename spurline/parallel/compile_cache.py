"""The compile cache of PyTorch Inductor: remove libraries that a killed process left incomplete.

Inductor assumes that a library that exists is complete. If its process was killed while writing it, every later
compilation of the same graph fails with an ImportError ("file too short").
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

BEING_WRITTEN_SECONDS = 60.0
"""A file younger than this may still be being written: it is checked twice."""


def remove_broken_libraries(folder: Path | None = None, patience: float = 3.0) -> list[Path]:
    """Remove incomplete libraries from the cache (default: that of this process), and return their paths.

    A recently written file counts as broken if it has not changed after `patience` seconds.
    """
    if folder is None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        folder = Path(cache_dir())
    broken = {path: stamp for path in _libraries(folder) if (stamp := _stamp(path)) and not is_complete(path)}
    if any(time.time() - changed < BEING_WRITTEN_SECONDS for _, changed in broken.values()):
        time.sleep(patience)
        broken = {path: stamp for path, stamp in broken.items() if _stamp(path) == stamp and not is_complete(path)}
    for path in broken:
        path.unlink(missing_ok=True)
    return sorted(broken)


def broken_library(message: str) -> str:
    """The library that an error message of the dynamic loader reports as incomplete, or an empty string."""
    found = re.search(r"(/[^\s:']+\.so): (?:file too short|invalid ELF header|cannot read file data|ELF)", message)
    return found[1] if found else ""


def is_complete(path: Path) -> bool:
    """Whether a library has all of its bytes, according to its header (an ELF file ends with its section table)."""
    try:
        with open(path, "rb") as file:
            header = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return True  # gone, or not ours to judge
    if not sys.platform.startswith("linux"):
        return size > 0
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    sections = int.from_bytes(header[0x28:0x30], "little")
    entry_bytes, num_entries = (int.from_bytes(header[i : i + 2], "little") for i in (0x3A, 0x3C))
    return size >= sections + entry_bytes * num_entries


def _libraries(folder: Path) -> list[Path]:
    return [path for pattern in ("*.so", "*.o") for path in folder.glob(f"*/{pattern}")]


def _stamp(path: Path) -> tuple[int, float] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime
