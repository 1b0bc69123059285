"""What is in a checkpoint: its tensors, and how they were shared by the ranks that wrote them."""

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
    """How many parts each dim is cut into, such as 4x1; `whole` if it isn't."""


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """All tensors of a complete checkpoint, in the order of their names."""
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    return [
        _described(name, entry) for name, entry in sorted(saved.items()) if isinstance(entry, TensorStorageMetadata)
    ]


def _described(name: str, entry: TensorStorageMetadata) -> StoredTensor:
    # A part begins at its own place in each dim that is cut, and at 0 in the others.
    parts = [len({chunk.offsets[dim] for chunk in entry.chunks}) for dim in range(len(entry.size))]
    return StoredTensor(
        name,
        list(entry.size),
        str(entry.properties.dtype).removeprefix("torch."),
        math.prod(entry.size) * entry.properties.dtype.itemsize,
        "x".join(map(str, parts)) if math.prod(parts) > 1 else "whole",
    )
