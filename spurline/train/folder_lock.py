"""One owner per run folder: `run.lock` identifies the process, its modification time shows it is alive. Torch-free.

A second job on the folder would mix its lines into the metrics and remove the other's checkpoints. A lock whose owner
is dead is taken over: on the same machine if the process has ended, on another one if the lock has not been touched for
some minutes. An attempt of the job that owns the folder takes it over at once: the launcher has ended the ranks of the
attempt before, and one that it could not reach finds out with its next beat.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from spurline.train.exit_codes import FolderInUseError
from spurline.train.processes import Process
from spurline.untrusted import open_regular

BEAT_SECONDS = 20.0
STALE_SECONDS = 180.0
"""Nine beats: cluster file systems may show a new modification time up to a minute late."""
_POLL_SECONDS = 1.0
_MAX_BYTES = 10_000
_INSTEAD = "Use another --job.dump_folder, or end that job first"


@dataclass(frozen=True)
class Owner:
    """What a lock says about the process that owns the folder."""

    process: Process
    job: str
    """The launcher's job, the same for all its attempts; empty without a launcher."""
    since: str

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.process.machine}"

    @property
    def entry(self) -> dict[str, Any]:
        return {**asdict(self.process), "job": self.job, "since": self.since}


class FolderLock:
    """Owns a run folder from `take` to `release`."""

    def __init__(self, folder: str | os.PathLike[str], job: str = "", instead: str = _INSTEAD) -> None:
        """`instead` tells the user what to do if another process owns the folder."""
        self._instead = instead
        self.path = Path(folder) / "run.lock"
        self._remove = f"Remove {self.path} if no job uses this folder"
        self._own = Owner(Process.own(), job, time.strftime("%Y-%m-%d %H:%M:%S"))
        self._is_owned = False
        self._next_beat = 0.0
        self._waits_for: tuple[str, float] | None = None  # content and modification time of the lock

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
                file.write(json.dumps(self._own.entry) + "\n")
                file.flush()
                os.fsync(file.fileno())
                self._is_owned = True

    def owned_by(self) -> str:
        """Why the folder can't be taken, in one line; empty if it can. An OSError if the lock can't be read."""
        try:
            return self._why_owned(_read(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def wait(self, seconds: float, say: Callable[[str], None]) -> bool:
        """Wait for a sign of life of an owner on another machine; returns whether it is still unknown after `seconds`.

        The owner lives if the lock changes after the first call, and is dead if that does not happen for STALE_SECONDS.
        Then `owned_by` has the answer.
        """
        deadline = time.monotonic() + seconds
        while left := self._seconds_to_wait(say):
            if (turn := min(left, _POLL_SECONDS, deadline - time.monotonic())) <= 0:
                return True
            time.sleep(turn)
        return False

    def _seconds_to_wait(self, say: Callable[[str], None]) -> float:
        """How long the owner may stay silent until it counts as dead; 0 if it is known whether it lives."""
        try:
            content = _read(self.path)  # opening a file makes a network file system look for a new modification time
            found = content, self.path.stat().st_mtime
            silent = self._seconds_silent()
        except (FileNotFoundError, NotADirectoryError):
            return 0.0
        owner = _parse(content)
        if owner is None or owner.process.is_local or self._has_same_job(owner):
            return 0.0
        left = STALE_SECONDS - silent
        if not 0 < left <= 2 * STALE_SECONDS or self._waits_for not in (None, found):
            return 0.0
        if self._waits_for is None:
            say(f"waiting up to {left:.0f} s for the owner of {self.path.parent} ({owner}), which may have died")
        self._waits_for = found
        return left

    def beat(self) -> None:
        """Show that the owner is alive; cheap enough to be called often. Disk errors do not end the run.

        A FolderInUseError if another process has taken the folder over: a later attempt of the job, whose launchers
        could not reach this process, or another job, because this process was silent, as in a suspended machine. The
        same if the folder is gone.
        """
        if not self._is_owned or time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + BEAT_SECONDS
        with contextlib.suppress(OSError):
            try:
                content = _read(self.path)
            except FileNotFoundError:
                return self._write_again()
            self._refuse_new_owner(_parse(content))
            os.utime(self.path)

    def _refuse_new_owner(self, owner: Owner | None) -> None:
        if owner is None or owner.process == self._own.process:
            return
        silent = f"because this one had been silent for more than {STALE_SECONDS:.0f} seconds"
        why = "a later attempt of this job" if self._has_same_job(owner) else silent
        raise FolderInUseError(f"{self.path.parent} was taken over by {owner} (since {owner.since}), {why}")

    def _write_again(self) -> None:
        """Somebody has removed the lock, or the folder with all that this run has written."""
        try:
            with open(self.path, "x", encoding="utf-8") as file:
                file.write(json.dumps(self._own.entry) + "\n")
        except FileNotFoundError:
            raise FolderInUseError(f"{self.path.parent} was removed while this run wrote to it") from None

    def release(self) -> None:
        if self._is_owned:
            self._is_owned = False
            with contextlib.suppress(OSError, ValueError):
                if _parse(_read(self.path)) == self._own:
                    self.path.unlink()

    def _why_owned(self, content: str) -> str:
        """Why the folder can't be taken, in one line; empty if it has no owner, or one that is dead."""
        if not content.strip():
            return ""
        owner = _parse(content)
        if owner is None:
            return f"{self.path} is damaged. {self._remove}"
        if self._has_same_job(owner):
            return ""
        who, process, instead = f"{owner} (since {owner.since})", owner.process, self._instead
        if process.is_local:
            return f"{self.path.parent} belongs to {who}, which is still running. {instead}" if process.state() else ""
        silent = self._seconds_silent()
        if silent >= STALE_SECONDS:
            return ""
        if silent < -STALE_SECONDS:
            return f"{self.path.parent} belongs to {who}, last seen in the future: a clock was set back. {self._remove}"
        return f"{self.path.parent} belongs to {who}, which was seen {max(0, silent):.0f} seconds ago. {instead}"

    def _has_same_job(self, owner: Owner) -> bool:
        return owner.job != "" and owner.job == self._own.job

    def _seconds_silent(self) -> float:
        """Seconds since the last beat, by the file system's clock, which may differ from this machine's."""
        probe = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.probe")
        try:
            probe.touch()
            return probe.stat().st_mtime - self.path.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


def is_owned(folder: str | os.PathLike[str]) -> bool:
    """Whether a run is active in a folder, as far as a reader can tell; writes nothing."""
    path = Path(folder) / "run.lock"
    try:
        owner = _parse(_read(path))
        if owner is None:
            return False
        process = owner.process
        return bool(process.state()) if process.is_local else time.time() - path.stat().st_mtime <= STALE_SECONDS
    except OSError:
        return False


def _read(path: Path) -> str:
    """The text in a lock; an OSError if there is none, or if it is not a regular file."""
    with open_regular(path) as file:
        return file.read(_MAX_BYTES).decode("utf-8", "replace")


def _parse(content: str) -> Owner | None:
    try:
        entry: dict[str, Any] = json.loads(content)
        process = Process(str(entry["host"]), int(entry["pid"]), str(entry["started"]))
        owner = Owner(process, str(entry.get("job", "")), str(entry["since"])[:40])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return owner if f"{process.host}{owner.since}".isprintable() else None


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
