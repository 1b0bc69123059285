"""The endless order in which windows are read: position to window, with no state in between. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt


class SampleOrder:
    """An endless sequence over the windows of some sources: each goes epoch by epoch through its seeded permutations.

    Sources take turns as evenly as whole numbers allow. The first source gets floor(n * share + phase) of the first n
    positions, for every n; the second gets its share of the rest in the same way, and so on. So any stretch has each
    source in its proportion, to within a few windows, and the place of a window follows from n alone.
    """

    def __init__(self, num_windows: Sequence[int], weights: Sequence[Fraction], seed: int) -> None:
        """`weights` are positive; without any, a source weighs what it has, and all begin each epoch together."""
        assert min(num_windows) > 0
        weights = weights or [Fraction(count) for count in num_windows]
        self._seed = seed
        self._num_windows = list(num_windows)
        self._first_id = np.cumsum([0, *num_windows]).tolist()
        # Share of each source but the last in what the sources before it leave, and a phase of its own.
        self._turns = [
            _Turn(weight / sum(weights[i:]), Fraction(_phase(seed, i))) for i, weight in enumerate(weights[:-1])
        ]
        self._epochs: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def ids(self, start: int, count: int) -> list[int]:
        """The windows at positions [start, start + count), counted through all sources."""
        return [self._id(position) for position in range(start, start + count)]

    def source_of(self, position: int) -> tuple[int, int]:
        """The source that is read at a position, and how many windows of it were read before."""
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
            # Sources of the same size, which may correspond window by window, must not be in step.
            key = (epoch, source) if source else (epoch,)
            self._epochs[source] = epoch, shuffled(self._num_windows[source], self._seed, key)
        return self._epochs[source][1]


class _Turn:
    """Which of n positions are one source's, in integers: exact however far a run goes."""

    def __init__(self, share: Fraction, phase: Fraction) -> None:
        self._scale = share.denominator * phase.denominator
        self._share = share.numerator * phase.denominator
        self._phase = phase.numerator * share.denominator

    def count(self, num_positions: int) -> int:
        return (num_positions * self._share + self._phase) // self._scale


def shuffled(count: int, seed: int, key: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """A permutation of range(count) that follows from the seed and the key."""
    # numpy takes no negative seed, torch does.
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=key)
    return np.random.default_rng(sequence).permutation(count)


def _phase(seed: int, source: int) -> float:
    """A number in [0, 1) that makes another seed begin with other sources."""
    return float(np.random.default_rng(np.random.SeedSequence(seed % 2**64, spawn_key=(source,))).random())
