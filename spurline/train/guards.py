"""What protects a run while it lasts: the folder lock, the watchdog, logs, and reports of the first error."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import TracebackType

from spurline.parallel.world import World
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
    """Watches a run, as a context manager; from `own_folder` on it also owns the folder of the run.

    An error that is raised inside is logged and reported to the other ranks. One that another rank has caused becomes a
    LostRankError that names that rank, with its error.
    """

    def __init__(self, world: World, claim: Claim, watchdog_seconds: float, progress: Progress) -> None:
        self._folder, self._progress = claim.folder, progress
        self._channel = SideChannel(world.meeting) if world.meeting is not None else None
        self.watchdog = Watchdog(claim.folder / "logs", watchdog_seconds, self._channel)
        self._job, self._locks = claim.job, [FolderLock(claim.folder, claim.job)]
        self._log: RankLog | None = None
        self._contexts = ExitStack()

    def own_folder(
        self, trainer: Trainer, prepare: Callable[[], None] = lambda: None, checkpoint_folder: str = ""
    ) -> None:
        """Take ownership of the existing folder; a FolderInUseError on all ranks if another job owns it.

        The same for a `checkpoint_folder` elsewhere, unless it is remote: object stores have no locks. Then the first
        rank calls `prepare`, before anything is written to the folder.
        """
        if checkpoint_folder and not is_remote(checkpoint_folder):
            self._locks.append(FolderLock(checkpoint_folder, self._job))

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
        if error := error_of_last_attempt(log.folder):
            self._progress.log(f"restart {restart_count()}, because {error}")

    def __enter__(self) -> Guard:
        self.watchdog.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._contexts, _sigterm_ignored():
            self.watchdog.stop()
            self._release()
            if error is None or self._channel is None:
                return
            if self._log is not None:
                self._log.write(f"in step {self.watchdog.step}:\n{''.join(traceback.format_exception(error))}")
            if (cause := _tell(error, self._channel, self.watchdog.step)) is not error:
                raise cause from error


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
