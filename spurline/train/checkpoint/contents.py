"""What is in a checkpoint: its tensors, and how they were sharded over the ranks that wrote them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata


@dataclass(frozen=True)
class StoredTensor:
    name: str
    shape: list[int]
    dtype: str
    num_bytes: int
    parts_by_dim: str
    """The number of shards of each dim, such as 4x1; `whole` if there is one."""


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """All tensors of a complete checkpoint, sorted by name."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    return [
        _described(name, entry) for name, entry in sorted(saved.items()) if isinstance(entry, TensorStorageMetadata)
    ]


def _described(name: str, entry: TensorStorageMetadata) -> StoredTensor:
    # Shards have different offsets in each dim that is sharded, and offset 0 in the others.
    parts = [len({chunk.offsets[dim] for chunk in entry.chunks}) for dim in range(len(entry.size))]
    return StoredTensor(
        name,
        list(entry.size),
        str(entry.properties.dtype).removeprefix("torch."),
        math.prod(entry.size) * entry.properties.dtype.itemsize,
        "x".join(map(str, parts)) if math.prod(parts) > 1 else "whole",
    )
