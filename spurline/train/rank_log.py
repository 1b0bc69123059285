"""The log file of a rank, `<run folder>/logs/rank_2.log`: its console may not be shown anywhere. Torch-free."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from spurline.train.launcher import restart_count


class RankLog:
    """Timestamped lines, appended and flushed one by one; a disk error loses lines, not the run."""

    def __init__(self, run_folder: str | os.PathLike[str], rank: int) -> None:
        self.folder = Path(run_folder) / "logs"
        self.path = self.folder / f"rank_{rank}.log"
        self._file: IO[str] | None = None
        with contextlib.suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8", errors="replace", buffering=1)  # noqa: SIM115

    def write(self, text: str) -> None:
        if self._file is not None:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError, ValueError):
                self._file.write("".join(f"{now} {line}\n" for line in text.strip("\n").splitlines()))

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    @contextmanager
    def hearing_errors(self) -> Iterator[None]:
        """While inside, also log what Python writes to stderr, and the stacks on a fatal signal."""
        if self._file is None:
            yield
            return
        had_faulthandler = faulthandler.is_enabled()
        faulthandler.enable(self._file)
        try:
            with contextlib.redirect_stderr(_Both(sys.stderr, self)):
                yield
        finally:
            faulthandler.disable()
            if had_faulthandler:
                with contextlib.suppress(Exception):
                    faulthandler.enable()


class _Both:
    """A stream that also writes to a log; everything else is delegated to the stream."""

    def __init__(self, stream: Any, log: RankLog) -> None:
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        if text.strip():
            self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def note_first_error(folder: Path, line: str) -> None:
    """Append the first error of an attempt to logs/errors.log, for whoever reads it after a restart."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError), open(folder / "errors.log", "a", encoding="utf-8", errors="replace") as file:
        file.write(f"{now} attempt {restart_count()}: {line}\n")


def error_of_last_attempt(folder: Path) -> str:
    """Why torchrun has restarted the ranks, if one of them reported it; empty on the first attempt."""
    mark = f" attempt {restart_count() - 1}: "
    with contextlib.suppress(OSError):
        lines = (folder / "errors.log").read_text(encoding="utf-8", errors="replace").splitlines()
        if lines and mark in lines[-1]:
            return lines[-1].partition(mark)[2]
    return ""
