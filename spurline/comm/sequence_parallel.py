"""Split the positions of replicated sequences over ranks, and gather the results."""

import torch.distributed as dist
from torch import Tensor

from spurline.comm.collectives import join_sequence, split_sequence
from spurline.comm.sequence import SequenceShard


class SequenceParallel:
    """The ranks of `group` all have the same (B, L, D); each works on its share of every sequence's L positions."""

    def __init__(self, group: dist.ProcessGroup, sequence_rank_P: list[int]) -> None:
        self.group = group
        self.sequence_rank_P = sequence_rank_P  # which share each rank of the expert group works on

    def split(self, x_BLD: Tensor) -> Tensor:
        """(B, L, D) -> (B, l, D): this rank's real positions."""
        return split_sequence(x_BLD, self._shard(x_BLD.shape[1], self.group.rank()), self.group, dim=1)

    def join(self, y_BlD: Tensor, length: int) -> Tensor:
        """(B, l, D) -> (B, L, D): every rank's positions, on every rank."""
        return join_sequence(y_BlD, self._shard(length, self.group.rank()), self.group, dim=1)

    def tokens_per_rank(self, x_BLD: Tensor) -> list[int]:
        """The number of tokens that each rank of the expert group works on."""
        B, L, _ = x_BLD.shape
        return [B * self._shard(L, rank).num_real for rank in self.sequence_rank_P]

    def _shard(self, length: int, rank: int) -> SequenceShard:
        return SequenceShard(length, self.group.size(), rank)
