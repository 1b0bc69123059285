"""Time candidates in turn, so that what the machine does besides hits all of them alike."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate, in the order of the rounds."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The middle half of the rounds, from end to end, as a share of the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / self.median

    def ratio_to(self, other: "Timing") -> float:
        """The median over rounds of this candidate's time to the other's in the same round."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


def interleave(candidates: dict[str, Callable[[], object]], seconds: float, least: int = 5) -> dict[str, Timing]:
    """Run all candidates round after round: for about so many seconds, at least so many rounds, after one to warm up.

    Each round starts with another candidate, so that none always comes after the same neighbour.
    """
    names = list(candidates)
    for name in names:
        candidates[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    started, number = time.perf_counter(), 0
    while number < least or time.perf_counter() - started < seconds:
        for offset in range(len(names)):
            name = names[(number + offset) % len(names)]
            begin = time.perf_counter()
            candidates[name]()
            times[name].append(time.perf_counter() - begin)
        number += 1
    return {name: Timing(values) for name, values in times.items()}
