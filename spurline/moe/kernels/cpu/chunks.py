"""Rows that lie sorted by expert, cut into chunks to be worked on: of one expert, or of several that have few rows."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2048
"""Rows that are worked on at a time: enough to keep the cores busy, few enough to stay in cache."""
JOINED = 1 << 18
"""Elements (rows x width) up to which the rows of several experts make a chunk: about a core's own cache."""
MANY = 8
"""Parts of a chunk from which on one call multiplies them all."""


class Part(NamedTuple):
    """Neighbouring rows of one expert."""

    expert: int
    size: int
    is_first: bool
    is_last: bool


class Chunk(NamedTuple):
    """Neighbouring rows that are worked on together."""

    number: int
    parts: list[Part]
    sizes: list[int]
    """Of the parts."""
    size: int
    end_e: Tensor | None
    """Where the rows of each expert from the first to the last end, if there are many parts."""

    def is_mostly_skinny(self, most_rows: int) -> bool:
        """Whether at least half of the parts have no more than so many rows."""
        return 2 * sum(size <= most_rows for size in self.sizes) >= len(self.sizes)

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """Each part's rows."""
        return rows.split(self.sizes) if len(self.sizes) > 1 else (rows,)


def make_chunks(counts: list[int], width: int, whole_experts: bool) -> list[Chunk]:
    """Chunks of rows so wide, with so many rows for each expert: with whole_experts, none of them is cut."""
    size = max([1, *counts]) if whole_experts else CHUNK
    return list(_join(_cut(counts, size), JOINED // max(width, 1)))


def _cut(counts: list[int], size: int) -> Iterator[Part]:
    """The rows of each expert, in parts of up to `size`."""
    for expert, count in enumerate(counts):
        for first in range(0, count, size):
            yield Part(expert, min(size, count - first), first == 0, first + size >= count)


def _join(parts: Iterable[Part], most_rows: int) -> Iterator[Chunk]:
    """Neighbouring parts in one chunk, as long as they have no more than so many rows together."""
    number, joined, num_rows = 0, list[Part](), 0
    for part in parts:
        if joined and num_rows + part.size > most_rows:
            yield _chunk(number, joined)
            number, joined, num_rows = number + 1, [], 0
        joined.append(part)
        num_rows += part.size
    if joined:
        yield _chunk(number, joined)


def _chunk(number: int, parts: list[Part]) -> Chunk:
    sizes = [part.size for part in parts]
    return Chunk(number, parts, sizes, sum(sizes), _ends(parts) if len(parts) >= MANY else None)


def _ends(parts: list[Part]) -> Tensor:
    first, last = parts[0].expert, parts[-1].expert
    counts = [0] * (last - first + 1)
    for part in parts:
        counts[part.expert - first] += part.size
    return torch.tensor(counts).cumsum(0, dtype=torch.int32)
