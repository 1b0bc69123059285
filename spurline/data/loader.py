"""Batches by position: no state but the step number, so that a run resumes, or changes its ranks, on the same data.

Shapes: B sequences of L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from spurline.data.packing import Windows

Batch = tuple[torch.Tensor, torch.Tensor]


class TrainBatches:
    """An endless sequence of samples: epoch after epoch, each a seeded permutation of all windows."""

    def __init__(self, windows: Windows, seed: int) -> None:
        assert len(windows) > 0
        self.windows = windows
        self._seed = seed
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def sample_ids(self, start: int, count: int) -> list[int]:
        """The windows at positions [start, start + count) of the endless sequence."""
        ids: list[int] = []
        while len(ids) < count:
            epoch, offset = divmod(start + len(ids), len(self.windows))
            ids += self._epoch_order(epoch)[offset : offset + count - len(ids)].tolist()
        return ids

    def batch(self, start: int, count: int) -> Batch:
        """Tokens (B, L) and labels (B, L) of the samples at positions [start, start + count).

        With G sequences a step, micro-batch m of rank r of R starts at step * G + (m * R + r) * B.
        """
        return _to_batch(self.windows, self.sample_ids(start, count))

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _shuffled(len(self.windows), self._seed, epoch)
        return self._order


class ValidationBatches:
    """The held-out windows, always in the same shuffled order, so that a few batches speak for many documents."""

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self._order = _shuffled(len(windows), seed=0, epoch=0)

    def batches(self, batch_size: int, num_batches: int) -> Iterator[Batch]:
        """Up to `num_batches` of tokens (B, L) and labels (B, L); fewer, the last one smaller, when the windows end."""
        order = self._order[: batch_size * num_batches].tolist()
        for start in range(0, len(order), batch_size):
            yield _to_batch(self.windows, order[start : start + batch_size])


def _shuffled(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    # numpy takes no negative seed, torch does.
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=(epoch,))
    return np.random.default_rng(sequence).permutation(count)


def _to_batch(windows: Windows, window_ids: Sequence[int]) -> Batch:
    window_BL = torch.from_numpy(windows.take(window_ids).astype(np.int64))
    return window_BL[:, :-1].clone(), window_BL[:, 1:].clone()
