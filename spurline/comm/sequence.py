"""Virtual padding: how a sequence is shared by ranks that do not divide its length."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SequenceShard:
    """The positions of a sequence of `length` that rank `rank` of `size` owns: `per_rank` of them, in order.

    Positions past the end of the sequence are virtual; only the last ranks have some. They hold no token: a rank works
    on its real positions alone, and pads them just before a collective that wants the same size from everyone.
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
        """This rank's real positions of the whole sequence, a view: (.., length, ..) -> (.., num_real, ..)."""
        assert x.size(dim) == self.length, f"dim {dim} of {tuple(x.shape)} is not the length {self.length}"
        return x if self.size == 1 else x.narrow(dim, self.start, self.num_real)

    def pad(self, x: Tensor, dim: int) -> Tensor:
        """This rank's real positions, then zeros for its virtual ones: (.., num_real, ..) -> (.., per_rank, ..)."""
        assert x.size(dim) == self.num_real, f"dim {dim} of {tuple(x.shape)} is not num_real {self.num_real}"
        if self.num_virtual == 0:
            return x
        dims_after = x.dim() - 1 - dim % x.dim()
        return F.pad(x, [0, 0] * dims_after + [0, self.num_virtual])

    def trim(self, x: Tensor, dim: int) -> Tensor:
        """The whole sequence out of all ranks' padded shards, a view: (.., padded_length, ..) -> (.., length, ..)."""
        assert x.size(dim) == self.padded_length, f"dim {dim} of {tuple(x.shape)} is not {self.padded_length}"
        return x if self.padded_length == self.length else x.narrow(dim, 0, self.length)
