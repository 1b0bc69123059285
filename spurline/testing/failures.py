"""Failures of ranks, as readable reports."""

import itertools
import linecache
import pickle
import re
import signal
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from spurline.testing.messages import Raised

_WORKER = str(Path(__file__).with_name("worker.py"))
_TORCH = str(Path(getattr(find_spec("torch"), "origin", "")).parent)  # located without importing torch
# The files that define the collectives.
_COLLECTIVES = (f"{_TORCH}/distributed/distributed_c10d.py", f"{_TORCH}/distributed/_functional_collectives.py")


class Frame(NamedTuple):
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class RankFailure:
    rank: int
    kind: Literal["died", "raised", "stuck"]
    summary: str
    """One line: the exception, the cause of death, or the line where it is stuck."""
    details: str = ""
    """The remote traceback or stack; empty for a rank that died."""
    exception: BaseException | None = None
    """The exception that was raised, if it can be pickled."""


class RankError(Exception):
    """Some ranks failed: `failures` lists them, the likely root cause first; its exception is `__cause__`."""

    def __init__(self, what: str, failures: list[RankFailure]) -> None:
        # A dead rank makes others raise, and a rank that raised makes others hang. The sort is stable.
        self.failures = sorted(failures, key=lambda failure: ("died", "raised", "stuck").index(failure.kind))
        lines = [what, *(f"  rank {f.rank} {f.summary}" for f in self.failures)]
        # Ranks often fail identically: show each distinct text once.
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for failure in self.failures:
            if failure.details:
                ranks_of.setdefault((failure.kind, failure.details), []).append(failure.rank)
        for (kind, details), ranks in ranks_of.items():
            who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
            lines.append(f"\n--- {who} {kind}\n{details.rstrip()}")
        super().__init__("\n".join(lines))
        self.__cause__ = self.failures[0].exception


def died(rank: int, exit_code: int | None) -> RankFailure:
    if exit_code is not None and exit_code < 0:
        return RankFailure(rank, "died", f"died: killed by {signal.Signals(-exit_code).name}")
    return RankFailure(rank, "died", f"died: its process ended with exit code {exit_code}")


def raised(rank: int, reply: Raised) -> RankFailure:
    exception = None if reply.exception is None else pickle.loads(reply.exception)
    return RankFailure(rank, "raised", f"raised {reply.summary}", reply.traceback, exception)


def stuck(rank: int, stack_dump: str, seconds: float) -> RankFailure:
    """A rank that did not return; `stack_dump` is the output of faulthandler, innermost frame first."""
    frames = [Frame(m[1], int(m[2]), m[3]) for m in re.finditer(r'File "(.*)", line (\d+) in (.*)', stack_dump)]
    frames = list(itertools.takewhile(lambda frame: frame.file != _WORKER, frames))
    if not stack_dump:
        place = "and did not respond to a signal"
    elif not frames:
        place = "outside of the function"
    else:
        place = _place(frames)
    details = "".join(
        f'  File "{f.file}", line {f.line}, in {f.function}\n    {linecache.getline(f.file, f.line).strip()}\n'
        for f in reversed(frames)
    )
    details = "Stack (most recent call last):\n" + details if details else ""
    return RankFailure(rank, "stuck", f"was stuck {place}; stopped after {seconds:.1f} s", details)


def _place(frames: list[Frame]) -> str:
    """Where a rank is stuck: the collective, and the innermost frame outside torch."""
    caller = next((i for i, f in enumerate(frames) if not f.file.startswith((_TORCH, "<"))), len(frames) - 1)
    collectives = [f.function for f in frames[:caller] if f.file in _COLLECTIVES]
    # Report the outermost of nested collectives: barrier, not the all_reduce that implements it.
    return f"in {collectives[-1]}, called by {frames[caller]}" if collectives else f"in {frames[caller]}"
