"""Interleaved timing, so that other load on the machine affects all candidates equally."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate in each round."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range over the rounds, as a fraction of the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.median

    def ratio_to(self, other: "Timing") -> float:
        """Median over rounds of the ratio to the other candidate's time in the same round."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def wait_for_device() -> None:
    """Synchronize with the accelerator, which still has work queued when a call returns."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def interleave(candidates: dict[str, Callable[[], object]], seconds: float, least: int = 5) -> dict[str, Timing]:
    """Time all candidates in rounds for about `seconds`, and at least `least` rounds, after one warmup round.

    The order rotates from round to round, so that no candidate always runs right after the same other one.
    """
    names = list(candidates)
    for name in names:
        candidates[name]()
    wait_for_device()
    times: dict[str, list[float]] = {name: [] for name in names}
    started, number = time.perf_counter(), 0
    while number < least or time.perf_counter() - started < seconds:
        for offset in range(len(names)):
            name = names[(number + offset) % len(names)]
            begin = time.perf_counter()
            candidates[name]()
            wait_for_device()
            times[name].append(time.perf_counter() - begin)
        number += 1
    return {name: Timing(values) for name, values in times.items()}
