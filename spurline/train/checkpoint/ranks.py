"""The ranks that write or read a checkpoint together: an error on one of them is raised on all."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


class DiskError(ValueError):
    """An OSError of any rank, in one line."""


class Ranks:
    """All ranks of the run, or this process alone if torch.distributed is not initialized."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """`group` contains all ranks; pass one if another thread uses the default group at the same time."""
        joined = dist.is_initialized()
        self.group = group
        self.size = dist.get_world_size(group) if joined else 1
        self.rank = dist.get_rank(group) if joined else 0

    def gather(self, call: Callable[[], T]) -> list[T]:
        """Make the call on every rank and return all results, by rank; an error on one rank is raised on all."""
        value: T | None = None
        error: Exception | None = None
        try:
            value = call()
        except Exception as raised:
            error = raised
        if self.size == 1:
            if error is not None:
                self._raise(0, error, "")
            return [cast(T, value)]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, (value, error and _picklable(error)), group=self.group)
        for rank, (_, failure) in enumerate(gathered):
            if failure is not None:
                self._raise(rank, *failure)
        return [value for value, _ in gathered]

    def first(self, call: Callable[[], T]) -> T:
        """Make the call on the first rank only, while the others wait, and return its result on all ranks."""
        return cast(T, self.gather(call if self.rank == 0 else lambda: None)[0])

    def raise_failure(self, failed: CheckpointException) -> NoReturn:
        """Raise the error that torch.distributed.checkpoint has gathered from all ranks and wrapped."""
        rank, (error, _) = min(failed.failures.items())
        if not isinstance(error, Exception):
            raise error from failed  # an interrupt
        self._raise(rank, error, str(failed))

    def _raise(self, rank: int, error: Exception, trace: str) -> NoReturn:
        if isinstance(error, OSError):
            file = f"{error.filename}: " if error.filename else ""
            where = f" (rank {rank})" if self.size > 1 else ""
            raise DiskError(f"{file}{error.strerror or error}{where}") from error
        if self.size == 1 or isinstance(error, ValueError):
            raise error
        raise RuntimeError(f"rank {rank} failed:\n{trace}")


def _picklable(error: Exception) -> tuple[Exception, str]:
    """The error and its traceback as types that can be pickled, which not every exception can."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, OSError):
        return OSError(error.errno, error.strerror or str(error), error.filename), trace
    return (ValueError if isinstance(error, ValueError) else RuntimeError)(str(error)), trace
