"""What is in a checkpoint: its tensors, and how they were sharded over the ranks that wrote them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spurline.train.checkpoint.layout import Layout, TensorLayout


@dataclass(frozen=True)
class TensorSummary:
    name: str
    shape: list[int]
    dtype: str
    num_bytes: int
    parts_by_dim: str
    """The number of shards of each dim, such as 4x1; `whole` if there is one."""


def tensor_summaries(layout: Layout) -> list[TensorSummary]:
    """All tensors of a checkpoint, sorted by name."""
    return [_described(name, entry) for name, entry in sorted(layout.tensors.items())]


def _described(name: str, entry: TensorLayout) -> TensorSummary:
    # Shards have different offsets in each dim that is sharded, and offset 0 in the others.
    parts = [len({chunk.offsets[dim] for chunk in entry.chunks}) for dim in range(len(entry.shape))]
    return TensorSummary(
        name,
        list(entry.shape),
        str(entry.dtype).removeprefix("torch."),
        entry.num_bytes,
        "x".join(map(str, parts)) if math.prod(parts) > 1 else "whole",
    )
