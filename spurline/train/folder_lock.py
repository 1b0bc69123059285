"""One owner per run folder: `run.lock` identifies the process, its modification time shows it is alive. Torch-free.

A second job on the folder would mix its lines into the metrics and remove the other's checkpoints. A lock whose owner
is dead is taken over: on the same machine if the process has ended, on another one if the lock has not been touched for
some minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from spurline.train.exit_codes import FolderInUseError
from spurline.train.processes import Process
from spurline.untrusted import open_regular

BEAT_SECONDS = 20.0
STALE_SECONDS = 180.0
"""Nine beats: cluster file systems may show a new modification time up to a minute late."""
_MAX_BYTES = 10_000


class FolderLock:
    """Owns a run folder from `take` to `release`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder) / "run.lock"
        self._remove = f"Remove {self.path} if no job uses this folder"
        self._process = Process.own()
        self._owner = {**asdict(self._process), "run_id": os.environ.get("TORCHELASTIC_RUN_ID", ""), "since": _now()}
        self._is_owned = False
        self._next_beat = 0.0

    def take(self) -> None:
        """Become the owner; a FolderInUseError of one line if another process is."""
        while not self._is_owned:
            with open(self.path, "a+", encoding="utf-8", errors="replace") as file, _alone(file):
                if not _is_at(file, self.path):
                    continue  # the owner has removed it in the meantime
                file.seek(0)
                if problem := self._why_owned(file.read(_MAX_BYTES)):
                    raise FolderInUseError(problem)
                file.seek(0)
                file.truncate()
                file.write(json.dumps(self._owner) + "\n")
                file.flush()
                os.fsync(file.fileno())
                self._is_owned = True

    def owned_by(self) -> str:
        """Why the folder can't be taken, in one line; empty if it can. An OSError if the lock can't be read."""
        try:
            return self._why_owned(_read(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def beat(self) -> None:
        """Show that the owner is alive; cheap enough to be called often. Disk errors do not end the run.

        A FolderInUseError if this process was silent for so long, as in a machine that was suspended, that another one
        has taken the folder over.
        """
        if self._is_owned and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + BEAT_SECONDS
            with contextlib.suppress(OSError):
                owner, since = _parse(_read(self.path))
                if owner is not None and owner != self._process:
                    raise FolderInUseError(
                        f"{self.path.parent} was taken over by process {owner.pid} on {owner.machine} (since {since}),"
                        f" because this one had been silent for more than {STALE_SECONDS:.0f} seconds"
                    )
                os.utime(self.path)

    def release(self) -> None:
        if self._is_owned:
            self._is_owned = False
            with contextlib.suppress(OSError, ValueError):
                if json.loads(_read(self.path)) == self._owner:
                    self.path.unlink()

    def _why_owned(self, content: str) -> str:
        """Why the folder can't be taken, in one line; empty if it has no owner, or one that is dead."""
        if not content.strip():
            return ""
        owner, since = _parse(content)
        if owner is None:
            return f"{self.path} is damaged. {self._remove}"
        who = f"process {owner.pid} on {owner.machine} (since {since})"
        another = "Use another --job.dump_folder, or end that job first"
        if owner.is_local:
            return f"{self.path.parent} belongs to {who}, which is still running. {another}" if owner.state() else ""
        silent = self._seconds_silent()
        if silent > STALE_SECONDS:
            return ""
        if silent < -STALE_SECONDS:
            return f"{self.path.parent} belongs to {who}, last seen in the future: a clock was set back. {self._remove}"
        return (
            f"{self.path.parent} belongs to {who}, which was seen {max(0, silent):.0f} seconds ago. {another};"
            f" a job that has died is given up after {STALE_SECONDS:.0f} seconds"
        )

    def _seconds_silent(self) -> float:
        """Seconds since the last beat, by the file system's clock, which may differ from this machine's."""
        probe = self.path.with_name(f".{self.path.name}.{os.getpid()}.probe")
        try:
            probe.touch()
            return probe.stat().st_mtime - self.path.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


def is_owned(folder: str | os.PathLike[str]) -> bool:
    """Whether a run is active in a folder, as far as a reader can tell; writes nothing."""
    path = Path(folder) / "run.lock"
    try:
        owner, _ = _parse(_read(path))
        if owner is None:
            return False
        return bool(owner.state()) if owner.is_local else time.time() - path.stat().st_mtime <= STALE_SECONDS
    except OSError:
        return False


def _read(path: Path) -> str:
    """The text in a lock; an OSError if there is none, or if it is not a regular file."""
    with open_regular(path) as file:
        return file.read(_MAX_BYTES).decode("utf-8", "replace")


def _parse(content: str) -> tuple[Process | None, str]:
    try:
        entry: dict[str, Any] = json.loads(content)
        owner = Process(str(entry["host"]), int(entry["pid"]), str(entry["started"]))
        since = str(entry["since"])[:40]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None, ""
    return (owner, since) if f"{owner.host}{since}".isprintable() else (None, "")


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def _alone(file: IO[str]) -> Iterator[None]:
    """Hold an exclusive lock on the file while inside, if the platform and the file system support it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    yield  # closing the file releases it


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
