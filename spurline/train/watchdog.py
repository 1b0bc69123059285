"""A thread that ends the run when a step takes too long or a rank falls silent, and names the rank responsible.

Without it, a rank that is stopped, swapped out or stuck makes all others wait in a collective until that times out,
half an hour later, and then the error names one of those that waited.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import distributed_c10d

from spurline.parallel.rendezvous import name_ranks
from spurline.train.exit_codes import ExitCode, FolderInUseError
from spurline.train.launcher import record_error, restart_count
from spurline.train.processes import Process
from spurline.train.side_channel import Beat, SideChannel
from spurline.train.whereabouts import Place, place_of

STEP = "step"
LEAST_SECONDS, TIMES_MEDIAN = 300.0, 20.0
TIMES_OTHER_PHASES = 6.0
"""Everything but an ordinary step (startup, the first step, validation, checkpoints) may take longer."""
_SECONDS_TO_DUMP = 2.0
_SECONDS_TO_END = 6.0
"""Ranks that have failed usually end within this time, and show the error then."""


class Watchdog:
    """Watches the thread that creates it, from `start` to `stop`.

    That thread announces each phase with `mark`; everything else is read from outside, at no cost to the step.
    """

    def __init__(self, seconds: float = 0.0, channel: SideChannel | None = None) -> None:
        """`seconds` is the limit of a step (0: from the median, -1: none)."""
        self.log_folder: Path | None = None
        """Where stacks are written, once the folder of the run is known."""
        self.module_names: Mapping[int, str] = {}
        """By id(), to identify the layer."""
        self.phase_of_step: Callable[[], str] = str
        """Returns the current phase of the step."""
        self.on_beat: Callable[[], None] = lambda: None
        """Called with each heartbeat; a FolderInUseError ends the run."""
        self.on_end: Callable[[], None] = lambda: None
        """Called last before the process ends, because nothing is cleaned up."""
        self.say: Callable[[str], None] = lambda line: None
        self.show: Callable[[str], None] = lambda line: None
        """Called with the first error of any rank, if the ranks do not end by it soon."""
        self._seconds, self._channel = seconds, channel
        self._watched = threading.get_ident()
        self._marked = (0, "start", time.monotonic())
        self._durations: deque[float] = deque(maxlen=64)
        self._number = 0
        self._process = Process.own()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._heard: tuple[int, int, float] | None = None  # a rank, the number of its last beat, and when that was new
        self._store_failed_since: float | None = None
        self._error_since: float | None = None
        self._error_shown = False

    # In the thread that is watched.

    def mark(self, step: int, phase: str) -> None:
        """Announce that a phase of a step begins, and that the previous one has ended."""
        now = time.monotonic()
        _, before, since = self._marked
        if before == STEP:
            self._durations.append(now - since)
        self._marked = (step, phase, now)

    @property
    def step(self) -> int:
        return self._marked[0]

    def start(self) -> None:
        if self._channel is not None:
            self._channel.send(self._beat())  # with its process: others can tell whether it is alive
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: the thread is done, or has failed. Other ranks no longer wait for its heartbeat."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(5)
        if self._channel is not None:
            with contextlib.suppress(Exception):
                self._channel.leave(self._beat())

    # Limits.

    @property
    def limit(self) -> float:
        """Seconds that a step may take. A single rank has no limit unless one is given: no other rank waits for it."""
        if self._seconds > 0:
            return self._seconds
        if self._seconds < 0 or self._channel is None:
            return float("inf")
        median = statistics.median(self._durations) if self._durations else 0.0
        return max(LEAST_SECONDS, TIMES_MEDIAN * median)

    @property
    def limit_of_phase(self) -> float:
        is_ordinary = self._marked[1] == STEP and len(self._durations) > 0
        return self.limit if is_ordinary else TIMES_OTHER_PHASES * self.limit

    @property
    def period(self) -> float:
        """Seconds between heartbeats."""
        return min(5.0, max(0.2, self.limit / 20))

    # In the thread that watches.

    def _watch(self) -> None:
        while not self._stopping.wait(self.period):
            try:
                self.on_beat()
            except FolderInUseError as error:
                self._leave(str(error))
            step, phase, since = self._marked
            seconds = time.monotonic() - since
            if self._channel is None:
                if seconds > self.limit_of_phase:
                    self._end(f"step {step}: {phase} has taken {seconds:.0f} s, {self._beat()}", [])
                continue
            try:
                self._watch_others(self._channel, seconds > self.limit_of_phase)
                self._store_failed_since = None
            except (RuntimeError, ValueError) as error:  # from the store, or from its contents
                self._store_failed_since = self._store_failed_since or time.monotonic()
                if time.monotonic() - self._store_failed_since > self.limit:
                    self._end(f"the store of the ranks does not answer: {str(error).splitlines()[0]}", [])

    def _watch_others(self, channel: SideChannel, is_late: bool) -> None:
        channel.send(self._beat())
        self._show_error(channel)
        verdict = channel.verdict()
        if verdict is None and (silent := self._silent_rank(channel)) is not None:
            verdict = channel.judge(*self._verdict(channel, [silent]))
        if verdict is None and is_late:
            verdict = channel.judge(*self._verdict(channel, []))
        if verdict is not None:
            self._end(verdict["line"], verdict["silent"])

    def _show_error(self, channel: SideChannel) -> None:
        """Show the first error once if ranks go on: the one that failed may wait for a checkpoint in the background."""
        if self._error_shown or (error := channel.first_error()) is None:
            return
        if self._error_since is None:
            self._error_since = time.monotonic()
        if time.monotonic() - self._error_since > _SECONDS_TO_END:
            self._error_shown = True
            self.show(f"{error['line']}; waiting for what the ranks have begun, such as a checkpoint")

    def _beat(self) -> Beat:
        step, phase, since = self._marked
        self._number += 1
        seconds = time.monotonic() - since
        is_suspect = seconds > self.limit_of_phase / 2
        place = Place()
        if threading.get_ident() != self._watched:
            place = place_of(self._watched, self.module_names if is_suspect else None)
        if phase == STEP and (part := self.phase_of_step()):
            phase = part
        rank = self._channel.rank if self._channel else 0
        text = str(place) if place.line else ""
        return Beat(rank, self._process, self._number, step, phase, seconds, place.collective, text, _calls())

    def _silent_rank(self, channel: SideChannel) -> int | None:
        """The next rank that is not done, if its heartbeat has not changed for too long; each rank watches one.

        A rank that has not been heard of may take longer, as the start does: it may still load libraries.
        """
        for distance in range(1, channel.size):
            rank = (channel.rank + distance) % channel.size
            beat = channel.beats([rank]).get(rank)
            if beat is not None and beat.is_done:
                continue
            number = beat.number if beat else 0
            if self._heard is None or self._heard[:2] != (rank, number):
                self._heard = (rank, number, time.monotonic())
            patience = 0.75 * self.limit * (1 if beat else TIMES_OTHER_PHASES)
            return rank if time.monotonic() - self._heard[2] > patience else None
        return None

    def _verdict(self, channel: SideChannel, silent: list[int]) -> tuple[str, list[int]]:
        """One line that names the rank that did not arrive and those that wait for it, and the silent ranks.

        After an error of a rank, that is the line: others wait for this rank, or it waits for something.
        """
        if (error := channel.first_error()) is not None:
            return error["line"], silent
        beats = channel.beats(range(channel.size))
        step, phase, since = self._marked
        if silent and silent[0] not in beats:
            line = f"step {step}: rank {silent[0]} has not been heard of since the ranks met"
            return f"{line}{self._stacks('the others')}", silent
        if silent:
            late = beats[silent[0]]
            state = late.process.state() if late.process.is_local else "?"
            why = {"T": "its process is stopped", "D": "its process waits for a device or a disk", "": "it is gone"}
            reason = why.get(state, "its machine may be gone")
            what = f"step {step}: rank {late.rank} has been silent for {0.75 * self.limit:.0f} s ({reason})"
        else:
            late = _latest(list(beats.values()))
            seconds = time.monotonic() - since
            what = f"step {step}: {phase} has taken {seconds:.0f} s, and rank {late.rank} did not arrive"
        waiting = [beat.rank for beat in beats.values() if beat.rank != late.rank and beat.collective]
        others = f"; {name_ranks(waiting)} wait{'s' * (len(waiting) == 1)} for it" if waiting else ""
        return f"{what}. Last seen: {late}{others}{self._stacks('all ranks')}", silent

    def _stacks(self, whose: str) -> str:
        return f". Stacks of {whose}: {self.log_folder}" if self.log_folder else ""

    def _leave(self, line: str) -> NoReturn:
        """End the run on all ranks without another word in its folder, which another job owns."""
        if self._channel is not None:
            with contextlib.suppress(Exception):
                self._channel.log_folder = None
                self._channel.tell_first_error(line, self._channel.rank)
        record_error(line)
        with contextlib.suppress(Exception):
            print(f"spurline train: {line}", file=sys.stderr, flush=True)
        os._exit(ExitCode.FOLDER_IN_USE)

    def _end(self, line: str, silent: list[int]) -> NoReturn:
        """Write the stacks, end ranks that can't end themselves, and end this process."""
        self.say(f"watchdog: {line}")
        self._dump(line)
        channel = self._channel
        speaker = 0
        if channel is not None:
            with contextlib.suppress(Exception):
                _wait_until(lambda: channel.count("dumped") >= channel.size - len(silent), channel.count("dumped", 1))
                for beat in channel.beats(silent).values():
                    beat.process.kill()
            speaker = min(set(range(channel.size)) - set(silent), default=0)
        record_error(line)
        with contextlib.suppress(Exception):
            if channel is None or channel.rank == speaker:
                print(f"spurline train: {line}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        with contextlib.suppress(Exception):
            self.on_end()
        os._exit(ExitCode.WATCHDOG)

    def _dump(self, line: str) -> None:
        if self.log_folder is None:
            return
        rank = self._channel.rank if self._channel else 0
        path = self.log_folder / f"stacks_attempt_{restart_count()}_rank_{rank}.txt"
        with contextlib.suppress(OSError):
            self.log_folder.mkdir(exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(f"{line}\n\n{self._beat()}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)


def _latest(beats: list[Beat]) -> Beat:
    """The rank that others wait for: furthest behind; among equals, the one that is not in a collective."""
    return min(beats, key=lambda beat: (beat.is_done, beat.step, bool(beat.collective), beat.calls))


def _calls() -> int:
    """The number of collectives that this rank has started, in all of its groups."""
    if not dist.is_initialized():
        return 0
    total = 0
    groups: list[Any] = list(distributed_c10d._world.pg_map)  # the type stub lacks the method below
    for group in groups:
        with contextlib.suppress(Exception):
            total += group._get_sequence_number_for_group()
    return total


def _wait_until(happened: Callable[[], bool], _: object = None) -> None:
    deadline = time.monotonic() + _SECONDS_TO_DUMP
    while time.monotonic() < deadline and not happened():
        time.sleep(0.05)
