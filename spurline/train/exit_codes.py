"""The exit codes of a run, and the errors that have one of their own. Torch-free.

The table in docs/reliability.md lists the codes.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Why `spurline train` ended. A signal without a checkpoint is 128 plus its number, as in a shell."""

    FINISHED = 0
    """All steps were taken."""
    FAILED = 1
    """Any other error: a bug, with its traceback."""
    USAGE = 2
    """Options, data or files that can't be used, or a disk that is full; one line says which."""
    DIVERGED = 3
    """The loss, the gradients or the weights are not finite."""
    FOLDER_IN_USE = 4
    """Another job owns the run folder."""
    LOST_RANK = 5
    """Another rank has failed or is gone; the line says which, and why."""
    WATCHDOG = 6
    """A step took too long, or a rank has fallen silent; the line names the rank that did not arrive."""
    COPIES_DIFFER = 7
    """Ranks hold different copies of a tensor that must be the same on all of them."""
    STOPPED = 75
    """A signal has stopped the run after a checkpoint: the same command resumes it (EX_TEMPFAIL of sysexits.h)."""


class RunError(ValueError):
    """An error of a run that is shown to the user as one line."""

    exit_code = ExitCode.USAGE


class RefusedError(RunError):
    """The run can't start here. A restart would be refused too, so `spurline launch` does not try one."""


class DivergedError(RunError):
    exit_code = ExitCode.DIVERGED


class CopiesDifferError(RunError):
    exit_code = ExitCode.COPIES_DIFFER


class FolderInUseError(RunError):
    exit_code = ExitCode.FOLDER_IN_USE


class LostRankError(RunError):
    exit_code = ExitCode.LOST_RANK


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code for an error that ends a run."""
    if isinstance(error, RunError):
        return error.exit_code
    return ExitCode.USAGE if isinstance(error, (ValueError, OSError)) else ExitCode.FAILED


def exit_code_of_signal(number: int, saved: bool) -> int:
    """The exit code of a run that a signal has stopped; `saved`: whether it left a checkpoint."""
    return ExitCode.STOPPED if saved else 128 + number
