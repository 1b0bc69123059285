"""Detect whether the loss has jumped, and whether it stays there. Free of torch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

WINDOW = 50
"""The number of values that the usual loss is computed from."""
FEWEST = 20
"""With fewer values than this, nothing is a spike."""


class UsualLoss:
    """The most recent values of the loss, without spikes."""

    def __init__(self, window: int = WINDOW, fewest: int = FEWEST) -> None:
        self.usual = math.nan
        """The mean of the values before the last one, or that one itself while there are too few."""
        self._losses: deque[float] = deque(maxlen=window)
        self._fewest = fewest

    def is_spike(self, loss: float) -> bool:
        """Whether the next value is both six standard deviations and 10% above the usual; spikes are not kept."""
        spikes = False
        self.usual = loss
        if len(self._losses) >= self._fewest:
            self.usual, spread = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            spikes = loss > self.usual + 6 * spread and loss > 1.1 * self.usual
        if not spikes:
            self._losses.append(loss)
        return spikes


class LossSpike(NamedTuple):
    first_step: int
    """The logged step at which it began."""
    loss: float
    usual: float


class LossSpikes:
    """Tracks the loss of logged steps and finds spikes that last."""

    def __init__(self, patience: int, window: int = WINDOW, fewest: int = FEWEST) -> None:
        """`patience`: how many logged steps in a row a spike must last."""
        self._usual = UsualLoss(window, fewest)
        self._patience = patience
        self._in_a_row: list[LossSpike] = []

    def add(self, step: int, loss: float) -> LossSpike | None:
        """Add a logged step; returns the spike, once, when it has lasted for `patience` steps."""
        if not math.isfinite(loss):  # a bad step, which is handled elsewhere
            return None
        if not self._usual.is_spike(loss):
            self._in_a_row = []
            return None
        self._in_a_row.append(LossSpike(step, loss, self._usual.usual))
        return self._in_a_row[0] if len(self._in_a_row) == self._patience else None

    def forget(self) -> None:
        """Forget the current spike, whose steps are rolled back."""
        self._in_a_row = []
