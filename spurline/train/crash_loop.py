"""Handle a run that fails at the same step again and again: step back to an older checkpoint, and finally give up.

Every start of a run with checkpoints, its end, and the error of each rank that fails is a line of `failures.jsonl` in
the run folder. A start that has neither end nor error was killed. Free of torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spurline.files import append
from spurline.train.checkpoint.ranks import DiskError
from spurline.train.metrics.jsonl import last_step
from spurline.untrusted import lines, open_regular, parse_json

FAILURES_FILE = "failures.jsonl"
KILLED = "the process was killed"


class StepBack(NamedTuple):
    """How many of the newest checkpoints to skip when resuming, and why."""

    num_checkpoints: int = 0
    reason: str = ""


@dataclass
class _Start:
    """One start of the run, as recorded in the file."""

    run: str
    """Which run: a hash of its options and data."""
    resumed_from: int
    failures: list[tuple[int, str]] = field(default_factory=list)
    """Step and error of each rank that failed, in chronological order."""
    ended: bool = False

    def same_failure(self, other: _Start) -> tuple[int, str] | None:
        """A failure that both starts share; ranks that fail because of another one may be recorded in any order."""
        theirs = {(step, _without_numbers(error)) for step, error in other.failures}
        return next((mine for mine in self.failures if (mine[0], _without_numbers(mine[1])) in theirs), None)


class CrashLoop:
    """The starts and failures of the run in a folder. The first rank reads and records starts, any rank its failure."""

    def __init__(self, folder: Path, run: Mapping[str, Any], max_same_failures: int) -> None:
        """`run` is the run's fingerprint; after `max_same_failures` (0: no limit) it is not started again."""
        self.path = folder / FAILURES_FILE
        self._run = hashlib.sha256(json.dumps(run, sort_keys=True).encode()).hexdigest()[:16]
        self._limit = max_same_failures

    def step_back(self) -> StepBack:
        """How far to step back, given the failures so far; a ValueError if it is time to give up."""
        starts = self._read()
        if starts and not starts[-1].ended and not starts[-1].failures:
            # Lines up to the step that it resumed from are of earlier starts.
            step = max(last_step(self.path.parent / "metrics.jsonl"), starts[-1].resumed_from) + 1
            starts[-1].failures.append((step, KILLED))
            self._append({"step": step, "error": KILLED})
        same, failure = self._alike_at_the_end(starts)
        if failure is None or same < 2:
            return StepBack()
        step, error = failure
        if self._limit and same >= self._limit:
            tried = ", ".join(str(start.resumed_from) for start in starts[-same:])
            raise ValueError(
                f"step {step} has failed {same} times in a row with the same error, resumed from steps {tried}."
                f" To change the options or the data, add --job.allow_changes; --training.on_bad_step skip leaves out"
                f" steps that are not finite; to try again as it is, remove {self.path}. The error: {error}"
            )
        return StepBack(same - 1, f"step {step} has failed {same} times in a row with the same error ({error[:200]})")

    def start(self, resumed_from: int) -> None:
        """Record that the run starts, or resumes after this step; only on the first rank."""
        self._append({"run": self._run, "resumed_from": resumed_from})

    @contextmanager
    def recorded(self, rank: int, step: Callable[[], int]) -> Iterator[None]:
        """Record how the block ends: an error on any rank, in the step that `step` returns, or success on the first.

        An interrupt is recorded as a regular end. Disk errors are not recorded: they say nothing about the run.
        """
        try:
            yield
        except Exception as error:
            if not isinstance(error, OSError) and not isinstance(error.__cause__, DiskError):
                what = f"{type(error).__name__}: {error}".partition("\n")[0][:1000]
                self._append({"step": step(), "rank": rank, "error": what})
            raise
        except KeyboardInterrupt:
            self._append({"ended": "interrupted"})
            raise
        if rank == 0:
            self._append({"ended": "well"})

    def _alike_at_the_end(self, starts: list[_Start]) -> tuple[int, tuple[int, str] | None]:
        """How many of the last starts of this run failed in the same way, and how."""
        count, failure = 0, None
        for start in reversed(starts):
            if start.run != self._run or start.ended:
                break
            same = start.failures[0] if start is starts[-1] and start.failures else starts[-1].same_failure(start)
            if same is None:
                break
            count, failure = count + 1, same
        return count, failure

    def _read(self) -> list[_Start]:
        """The starts in the file; invalid lines are ignored."""
        starts: list[_Start] = []
        try:
            with open_regular(self.path) as file:
                for line in lines(file):
                    _take(line, starts)
        except (OSError, ValueError):
            return []
        return starts

    def _append(self, content: dict[str, Any]) -> None:
        try:
            with open(self.path, "ab", buffering=0) as file:
                append(file, (json.dumps(content) + "\n").encode())
        except OSError:  # a later start will know less, which is no reason to end the run
            return


def _take(line: bytes, starts: list[_Start]) -> None:
    try:
        content = parse_json(line)
        if "resumed_from" in content:
            starts.append(_Start(str(content["run"]), int(content["resumed_from"])))
        elif "error" in content:
            starts[-1].failures.append((int(content["step"]), str(content["error"])))
        elif "ended" in content:
            starts[-1].ended = True
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        return


def _without_numbers(error: str) -> str:
    """Mask the numbers in an error: ports, addresses and seconds differ between attempts."""
    return re.sub(r"0x[0-9a-f]+|[0-9]+(\.[0-9]+)?", "#", error)
