"""Whether the loss has jumped, and whether it stays there. Free of torch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

WINDOW = 50
"""Values that the usual loss is taken from."""
FEWEST = 20
"""Values without which nothing is unusual."""


class UsualLoss:
    """The last values of the loss, without its spikes."""

    def __init__(self, window: int = WINDOW, fewest: int = FEWEST) -> None:
        self.usual = math.nan
        """The mean of the values before the last one."""
        self._losses: deque[float] = deque(maxlen=window)
        self._fewest = fewest

    def is_spike(self, loss: float) -> bool:
        """Whether the next value is six standard deviations and a tenth above the usual; spikes do not become usual."""
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
    """The logged step with which it began."""
    loss: float
    usual: float


class LossSpikes:
    """Follows the loss of logged steps and finds spikes that last."""

    def __init__(self, patience: int, window: int = WINDOW, fewest: int = FEWEST) -> None:
        """`patience`: logged steps in a row that make a spike one that lasts."""
        self._usual = UsualLoss(window, fewest)
        self._patience = patience
        self._in_a_row: list[LossSpike] = []

    def add(self, step: int, loss: float) -> LossSpike | None:
        """Add a logged step; returns a spike that has lasted with it, once."""
        if not math.isfinite(loss):  # a bad step, which is somebody else's matter
            return None
        if not self._usual.is_spike(loss):
            self._in_a_row = []
            return None
        self._in_a_row.append(LossSpike(step, loss, self._usual.usual))
        return self._in_a_row[0] if len(self._in_a_row) == self._patience else None

    def forget(self) -> None:
        """The steps of the spike are taken back."""
        self._in_a_row = []
