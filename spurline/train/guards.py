"""What protects a run while it lasts: the folder lock, the watchdog, logs, and reports of the first error."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from spurline.parallel.rendezvous import Meeting
from spurline.remote import is_remote
from spurline.train.checkpoint.ranks import Ranks
from spurline.train.exit_codes import FolderInUseError, LostRankError
from spurline.train.folder_lock import FolderLock
from spurline.train.launcher import restart_count
from spurline.train.progress import Progress
from spurline.train.rank_log import RankLog, error_of_last_attempt
from spurline.train.run_folder import Claim, make_folder
from spurline.train.side_channel import SideChannel, is_communication_error
from spurline.train.trainer import Trainer
from spurline.train.watchdog import Watchdog


class Guard:
    """Watches a run from the time its ranks met (`watching`), and protects its folder (`protecting`, `own_folder`).

    An error that is raised inside is logged and reported to the other ranks. One that another rank has caused becomes a
    LostRankError that names that rank, with its error.
    """

    def __init__(self, watchdog_seconds: float) -> None:
        self.watchdog = Watchdog(watchdog_seconds)
        """That of `watching`."""
        self._seconds = watchdog_seconds
        self._channel: SideChannel | None = None
        self._locks: list[FolderLock] = []
        self._log: RankLog | None = None
        self._reported: BaseException | None = None
        self._contexts = ExitStack()

    @contextmanager
    def watching(self, meeting: Meeting | None) -> Iterator[None]:
        """Watch this rank and the others; `meeting` is None if there is only one rank."""
        self._channel = SideChannel(meeting) if meeting is not None else None
        self.watchdog = Watchdog(self._seconds, self._channel)
        self.watchdog.start()
        try:
            with self.reporting():
                yield
        finally:
            self.watchdog.stop()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Report an error that is raised inside, once: nested blocks report it in the innermost one."""
        try:
            yield
        except BaseException as error:
            if self._channel is None or error is self._reported:
                raise
            with _sigterm_ignored():
                if self._log is not None:
                    self._log.write(f"in step {self.watchdog.step}:\n{''.join(traceback.format_exception(error))}")
                self._reported = _tell(error, self._channel, self.watchdog.step)
            if self._reported is error:
                raise
            raise self._reported from error

    @contextmanager
    def protecting(self, claim: Claim, progress: Progress) -> Iterator[None]:
        """Prepare for `own_folder`; at the end, release what it has taken."""
        self._folder, self._job, self._progress = claim.folder, claim.job, progress
        self.watchdog.log_folder = claim.folder / "logs"
        self.watchdog.mark(0, "start")
        with self._contexts:
            try:
                with self.reporting():
                    yield
            finally:
                self._release()

    def own_folder(
        self, trainer: Trainer, prepare: Callable[[], None] = lambda: None, checkpoint_folder: str = ""
    ) -> None:
        """Take ownership of the existing folder; a FolderInUseError on all ranks if another job owns it.

        The same for a `checkpoint_folder` elsewhere, unless it is remote: object stores have no locks. Then the first
        rank calls `prepare`, before anything is written to the folder.
        """
        folders = [self._folder]
        if checkpoint_folder and not is_remote(checkpoint_folder):
            folders.append(Path(checkpoint_folder))
        self._locks = [FolderLock(folder, self._job) for folder in folders]

        def take() -> str:
            try:
                for lock in self._locks:
                    make_folder(lock.path.parent, "checkpoint.folder")
                    lock.take()
            except FolderInUseError as error:
                return str(error)
            return ""

        if problem := Ranks().first(take):
            raise FolderInUseError(problem)
        Ranks().first(prepare)
        self.watchdog.on_beat, self.watchdog.on_end = self._beat, self._release
        self.watchdog.module_names = {id(module): name for name, module in trainer.model.named_modules() if name}
        self.watchdog.phase_of_step = lambda: trainer.timer.current
        if self._channel is not None:
            self._open_log(self._channel)

    def _beat(self) -> None:
        for lock in self._locks:
            lock.beat()

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()

    def _open_log(self, channel: SideChannel) -> None:
        self._log = log = self._contexts.enter_context(closing(RankLog(self._folder, channel.rank)))
        self._contexts.enter_context(log.hearing_errors())
        own, channel.log_folder = channel.process, log.folder
        log.write(f"process {own.pid} on {own.machine}, {channel.size} ranks, restarts so far: {restart_count()}")
        self.watchdog.say = self._progress.listener = log.write
        self.watchdog.show = self._progress.log
        if error := error_of_last_attempt(log.folder):
            self._progress.log(f"restart {restart_count()}, because {error}")


def _tell(error: BaseException, channel: SideChannel, step: int) -> BaseException:
    """Report an error to the other ranks, or find out which of them caused it; returns the error to raise."""
    of_others = is_communication_error(error)
    try:
        if of_others and (cause := channel.explain(step)) is not None:
            return cause
        channel.tell_first_error(f"rank {channel.rank}: {type(error).__name__}: {error}", channel.rank)
    except (RuntimeError, ValueError):
        if of_others:
            return LostRankError("other ranks are gone, and so is the store of the ranks (that of torchrun, or rank 0)")
    return error


@contextmanager
def _sigterm_ignored() -> Iterator[None]:
    """While inside, ignore SIGTERM: torchrun sends it to all ranks as soon as one fails, but they have to say why."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
