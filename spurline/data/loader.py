"""Stateless loaders: a batch depends only on its position, so resuming or changing the rank count keeps the data.

Shapes: B sequences of L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from spurline.data.batch import Batch
from spurline.data.mixture import SampleOrder, shuffled
from spurline.data.packing import JoinedWindows, Windows, document_ids


def text_batch(windows: Windows | JoinedWindows, window_ids: Sequence[int]) -> Batch:
    """Tokens (B, L) and labels (B, L) of the given windows."""
    window_BL = torch.from_numpy(windows.take(window_ids).astype(np.int64))
    return Batch(window_BL[:, :-1].clone(), window_BL[:, 1:].clone())


def text_batch_by_documents(windows: Windows | JoinedWindows, window_ids: Sequence[int]) -> Batch:
    """Like `text_batch`, with the document id of each token."""
    batch = text_batch(windows, window_ids)
    return replace(batch, documents_BL=document_ids(batch.tokens_BL, windows.boundary_id))


MakeBatch = Callable[[Any, Sequence[int]], Batch]
"""(windows, window ids) -> batch."""


class TrainBatches:
    """An infinite sequence of samples: every epoch is a seeded permutation of all windows."""

    def __init__(
        self, windows: Any, seed: int, make_batch: MakeBatch = text_batch, order: SampleOrder | None = None
    ) -> None:
        """`order` mixes the windows of several sources (default: a single source)."""
        self.windows = windows
        self._make_batch = make_batch
        self._order = order or SampleOrder([len(windows)], [], seed)

    def sample_ids(self, start: int, count: int) -> list[int]:
        """Ids of the windows at positions [start, start + count) of the sequence."""
        return self._order.ids(start, count)

    def batch(self, start: int, count: int) -> Batch:
        """The samples at positions [start, start + count).

        With G sequences per step, micro-batch m of rank r of R starts at step * G + (m * R + r) * B.
        """
        return self._make_batch(self.windows, self.sample_ids(start, count))


class ValidationBatches:
    """The held-out windows in a fixed shuffled order, so that a few batches sample many documents."""

    def __init__(self, windows: Any, make_batch: MakeBatch = text_batch) -> None:
        self.windows = windows
        self._make_batch = make_batch
        self._order = shuffled(len(windows), seed=0, key=(0,))

    def batches(self, batch_size: int, num_batches: int) -> Iterator[Batch]:
        """At most `num_batches` batches of `batch_size` sequences; the last one may be smaller."""
        order = self._order[: batch_size * num_batches].tolist()
        for start in range(0, len(order), batch_size):
            yield self._make_batch(self.windows, order[start : start + batch_size])
