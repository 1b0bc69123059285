"""Sharding sequences over ranks whose number does not divide the length, by virtual padding."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SequenceShard:
    """The positions of a sequence of `length` that rank `rank` of `size` owns: `per_rank` consecutive ones.

    Positions past the end of the sequence are virtual; only the last ranks have some. They hold no token: a rank works
    only on its real positions, and pads them just before a collective that needs the same size on every rank.
    """

    length: int
    size: int
    rank: int

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} is not one of {self.size}"

    @property
    def per_rank(self) -> int:
        """Positions a rank owns, real and virtual."""
        return (self.length + self.size - 1) // self.size

    @property
    def start(self) -> int:
        return min(self.rank * self.per_rank, self.length)

    @property
    def stop(self) -> int:
        return min((self.rank + 1) * self.per_rank, self.length)

    @property
    def num_real(self) -> int:
        return self.stop - self.start

    @property
    def num_virtual(self) -> int:
        return self.per_rank - self.num_real

    @property
    def padded_length(self) -> int:
        """Positions of all ranks together, real and virtual."""
        return self.per_rank * self.size

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's real positions of the full sequence, a view: (.., length, ..) -> (.., num_real, ..)."""
        assert x.size(dim) == self.length, f"dim {dim} of {tuple(x.shape)} is not the length {self.length}"
        return x if self.size == 1 else x.narrow(dim, self.start, self.num_real)

    def pad(self, x: Tensor, dim: int) -> Tensor:
        """This rank's real positions, then zeros for its virtual ones: (.., num_real, ..) -> (.., per_rank, ..)."""
        assert x.size(dim) == self.num_real, f"dim {dim} of {tuple(x.shape)} is not num_real {self.num_real}"
        return _pad_end(x, dim, self.num_virtual)

    def trim(self, x: Tensor, dim: int) -> Tensor:
        """The full sequence from all ranks' padded shards, a view: (.., padded_length, ..) -> (.., length, ..)."""
        assert x.size(dim) == self.padded_length, f"dim {dim} of {tuple(x.shape)} is not {self.padded_length}"
        return x if self.padded_length == self.length else x.narrow(dim, 0, self.length)


@dataclass(frozen=True)
class HeadTailShard:
    """The positions of a sequence of `length` that rank `rank` of `size` owns: a chunk of its head, one of its tail.

    Under a causal mask, a position attends to all positions before it. Of 2 * size chunks, a rank owns number `rank`
    from the front and number `rank` from the back, so that all ranks have the same work. Lengths that 2 * size does not
    divide end in virtual positions, as in SequenceShard; a rank's positions are increasing, but not contiguous.
    """

    length: int
    size: int
    rank: int
    positions_per_chunk: int = 0
    """Real and virtual positions; 0: the fewest that cover the length."""

    @property
    def per_chunk(self) -> int:
        return self.positions_per_chunk or SequenceShard(self.length, 2 * self.size, 0).per_rank

    @property
    def ranges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Start and stop of this rank's real positions in its two chunks."""
        starts = self.rank * self.per_chunk, (2 * self.size - 1 - self.rank) * self.per_chunk
        head, tail = ((min(start, self.length), min(start + self.per_chunk, self.length)) for start in starts)
        return head, tail

    @property
    def num_real(self) -> int:
        return sum(stop - start for start, stop in self.ranges)

    def of_rank(self, rank: int) -> "HeadTailShard":
        return replace(self, rank=rank)

    def shortened(self, by: int) -> "HeadTailShard":
        """The same chunks of a sequence that is `by` positions shorter: a rank keeps its remaining positions."""
        return replace(self, length=self.length - by, positions_per_chunk=self.per_chunk)

    def positions(self, device: torch.device) -> Tensor:
        """This rank's real positions: (num_real,)."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.ranges])

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's real positions of the full sequence: (.., length, ..) -> (.., num_real, ..)."""
        assert x.size(dim) == self.length, f"dim {dim} of {tuple(x.shape)} is not the length {self.length}"
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.ranges], dim)

    def pad(self, x: Tensor, dim: int) -> Tensor:
        """This rank's positions, each chunk with its virtual ones: (.., num_real, ..) -> (.., 2 * per_chunk, ..)."""
        assert x.size(dim) == self.num_real, f"dim {dim} of {tuple(x.shape)} is not num_real {self.num_real}"
        if self.num_real == 2 * self.per_chunk:
            return x
        parts = x.split([stop - start for start, stop in self.ranges], dim)
        return torch.cat([_pad_end(part, dim, self.per_chunk - part.size(dim)) for part in parts], dim)

    def trim(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `pad`: (.., 2 * per_chunk, ..) -> (.., num_real, ..)."""
        if self.num_real == 2 * self.per_chunk:
            return x
        chunks = x.split(self.per_chunk, dim)
        parts = zip(chunks, self.ranges, strict=True)
        return torch.cat([chunk.narrow(dim, 0, stop - start) for chunk, (start, stop) in parts], dim)

    def in_order(self, x: Tensor, dim: int) -> Tensor:
        """The full sequence from all ranks' padded shards: (.., size * 2 * per_chunk, ..) -> (.., length, ..)."""
        dim %= x.dim()
        head, tail = x.unflatten(dim, (self.size, 2, self.per_chunk)).unbind(dim + 1)
        chunks = torch.cat([head, tail.flip(dim)], dim)  # the tails of later ranks come first
        return chunks.flatten(dim, dim + 1).narrow(dim, 0, self.length)

    def by_rank(self, x: Tensor, dim: int) -> Tensor:
        """The inverse of `in_order`: (.., length, ..) -> (.., size * 2 * per_chunk, ..)."""
        dim %= x.dim()
        padded = _pad_end(x, dim, 2 * self.size * self.per_chunk - self.length)
        head, tail = padded.unflatten(dim, (2, self.size, self.per_chunk)).unbind(dim)
        return torch.stack([head, tail.flip(dim)], dim + 1).flatten(dim, dim + 2)


def _pad_end(x: Tensor, dim: int, num: int) -> Tensor:
    """Append `num` zeros along a dim."""
    return x if num == 0 else F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, num])
