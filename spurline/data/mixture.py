"""The order in which windows are read, as a stateless map from position to window. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt


class SampleOrder:
    """An infinite sequence over the windows of several sources, each with a seeded permutation per epoch.

    Sources are interleaved as evenly as integers allow. Of the first n positions, the first source gets
    floor(n * share + phase), for every n; the second gets its share of the rest in the same way, and so on. Any
    interval thus has each source in proportion to within a few windows, and the window at position n depends only on n.
    """

    def __init__(self, num_windows: Sequence[int], weights: Sequence[Fraction], seed: int) -> None:
        """`weights` must be positive; if empty, sources are weighted by size, so their epochs coincide."""
        assert min(num_windows) > 0
        weights = weights or [Fraction(count) for count in num_windows]
        self._seed = seed
        self._num_windows = list(num_windows)
        self._first_id = np.cumsum([0, *num_windows]).tolist()
        # For each source but the last: its share of the positions that earlier sources leave, and a random phase.
        self._turns = [
            _Turn(weight / sum(weights[i:]), Fraction(_phase(seed, i))) for i, weight in enumerate(weights[:-1])
        ]
        self._epochs: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def ids(self, start: int, count: int) -> list[int]:
        """Ids (over all sources) of the windows at positions [start, start + count)."""
        return [self._id(position) for position in range(start, start + count)]

    def source_of(self, position: int) -> tuple[int, int]:
        """The source read at a position, and the number of its windows read before."""
        for source, turn in enumerate(self._turns):
            taken = turn.count(position)
            if turn.count(position + 1) > taken:
                return source, taken
            position -= taken
        return len(self._turns), position

    def _id(self, position: int) -> int:
        source, number = self.source_of(position)
        epoch, offset = divmod(number, self._num_windows[source])
        return self._first_id[source] + int(self._permutation(source, epoch)[offset])

    def _permutation(self, source: int, epoch: int) -> npt.NDArray[np.int64]:
        if source not in self._epochs or self._epochs[source][0] != epoch:
            # Sources of equal size may be aligned (such as translations): give each its own permutation.
            key = (epoch, source) if source else (epoch,)
            self._epochs[source] = epoch, shuffled(self._num_windows[source], self._seed, key)
        return self._epochs[source][1]


class _Turn:
    """Counts one source's positions among the first n, in exact integer arithmetic."""

    def __init__(self, share: Fraction, phase: Fraction) -> None:
        self._scale = share.denominator * phase.denominator
        self._share = share.numerator * phase.denominator
        self._phase = phase.numerator * share.denominator

    def count(self, num_positions: int) -> int:
        return (num_positions * self._share + self._phase) // self._scale


def shuffled(count: int, seed: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """A permutation of range(count) determined by seed and key."""
    # numpy does not accept negative seeds, torch does.
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=key)
    return np.random.default_rng(sequence).permutation(count)


def _phase(seed: int, source: int) -> float:
    """A number in [0, 1), so that different seeds start with different sources."""
    return float(np.random.default_rng(np.random.SeedSequence(seed % 2**64, spawn_key=(source,))).random())
