"""What ranks tell each other outside the collectives of a step: heartbeats, the first error, a verdict.

It goes through the rendezvous store, so it works while every collective is stuck.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spurline.parallel.rendezvous import Meeting
from spurline.train.exit_codes import LostRankError
from spurline.train.processes import Process
from spurline.train.rank_log import note_first_error

_SECONDS_TO_EXPLAIN = 2.0
_PAUSE = 0.05


@dataclass(frozen=True)
class Beat:
    """A heartbeat of a rank, with what it is doing."""

    rank: int
    process: Process
    number: int = 0
    step: int = 0
    phase: str = "start"
    seconds: float = 0.0
    """In this phase."""
    collective: str = ""
    place: str = ""
    calls: int = 0
    """Collectives that it has started."""
    is_done: bool = False

    def __str__(self) -> str:
        where = f", {self.place}" if self.place else ""
        who = f"rank {self.rank} (process {self.process.pid} on {self.process.machine})"
        return f"{who}: {self.phase} of step {self.step}{where}"


@dataclass
class SideChannel:
    """One rank's end of the channel. `wait` and `get` of the store would block, so keys are checked first."""

    meeting: Meeting
    log_folder: Path | None = None
    """Where the first error of an attempt is logged; set once this job owns the run folder."""
    process: Process = field(default_factory=Process.own)

    def __post_init__(self) -> None:
        self._store: dist.Store = self.meeting.side_store
        self._store.set_timeout(timedelta(seconds=20))

    @property
    def rank(self) -> int:
        return self.meeting.rank

    @property
    def size(self) -> int:
        return self.meeting.size

    def send(self, beat: Beat) -> None:
        self._store.set(f"beat/{beat.rank}", json.dumps(asdict(beat)))

    def beats(self, ranks: Iterable[int]) -> dict[int, Beat]:
        """The last beats of these ranks, without those that have sent none."""
        found: dict[int, Beat] = {}
        for rank in ranks:
            if (entry := self._read(f"beat/{rank}")) is not None:
                found[rank] = Beat(**{**entry, "process": Process(**entry["process"])})
        return found

    def verdict(self) -> dict[str, Any] | None:
        """Why all ranks must end, if one of them has decided so."""
        return self._read("verdict")

    def judge(self, line: str, silent: list[int]) -> dict[str, Any]:
        """Declare why all ranks must end; the first verdict wins and is returned."""
        mine = {"line": line, "silent": silent, "by": self.rank}
        said = json.loads(self._store.compare_set("verdict", "", json.dumps(mine)))
        if said == mine:
            self.tell_first_error(line, self.rank)
        return said

    def count(self, key: str, add: int = 0) -> int:
        """Add to a counter that all ranks share; returns it."""
        return self._store.add(key, add)

    def tell_first_error(self, line: str, rank: int) -> dict[str, Any]:
        """Report why this attempt of the run fails; the first report wins and is returned."""
        line = in_one_line(line)
        mine = {"rank": rank, "line": line, "by": self.rank}
        said = json.loads(self._store.compare_set("first_error", "", json.dumps(mine)))
        if said == mine and self.log_folder is not None:
            note_first_error(self.log_folder, line)
        return said

    def first_error(self) -> dict[str, Any] | None:
        """Why this attempt of the run fails, if a rank has reported it."""
        return self._read("first_error")

    def explain(self, step: int) -> LostRankError | None:
        """Which rank caused a collective to fail here in `step`, by its own error or because its process is gone."""
        deadline = time.monotonic() + _SECONDS_TO_EXPLAIN
        gone: list[int] = []
        while time.monotonic() < deadline and not gone:
            if (first := self.first_error()) is not None and first["by"] != self.rank:
                return LostRankError(first["line"])
            if (verdict := self.verdict()) is not None:
                return LostRankError(verdict["line"])
            others = [beat for rank, beat in self.beats(range(self.size)).items() if rank != self.rank]
            gone = [beat.rank for beat in others if beat.process.is_local and not beat.process.state()]
            time.sleep(_PAUSE)
        if not gone:
            return None
        time.sleep(10 * _PAUSE)  # a rank may have failed and ended before its error was read
        beat = self.beats(gone[:1])[gone[0]]
        line = (
            f"rank {beat.rank} is gone: process {beat.process.pid} on {beat.process.machine} has ended without a word"
            f" in step {step} (killed?)"
        )
        return LostRankError(self.tell_first_error(line, beat.rank)["line"])

    def leave(self, last: Beat) -> None:
        self.send(replace(last, is_done=True))

    def _read(self, key: str) -> dict[str, Any] | None:
        return json.loads(self._store.get(key)) if self._store.check([key]) else None


def in_one_line(text: str) -> str:
    """The first line of an error and, if it contains the traceback of another, that error, which is the last line."""
    found = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    return found[0] if len(found) == 1 else f"{found[0]} {found[-1]}"


def is_communication_error(error: BaseException) -> bool:
    """Whether a collective has failed, most likely because of another rank."""
    # ccl: NCCL, RCCL, oneCCL and their process groups.
    words = ("gloo", "ccl", "connection closed by peer", "connection reset by peer", "broken pipe")
    return isinstance(error, RuntimeError) and (
        isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
    )
