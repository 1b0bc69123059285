"""Permutations of rows on one rank: from rank-major order, in which they arrive, to sorted by expert.

P ranks of the group, e experts on this rank, R rows received, D width. Rows arrive in rank order, and from each rank
sorted by expert: a segment is what one rank sends to one expert.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spurline.moe.telemetry import counted
from spurline.ops.rows import permute_rows


class Permutation(Protocol):
    """(R, D) -> (R, D): `forward` sorts rows by expert, `inverse` restores their order."""

    def forward(self, rows_RD: Tensor) -> Tensor: ...

    def inverse(self, rows_RD: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SegmentPermutation:
    """Segments of any length, moved by an index."""

    index_R: Tensor
    inverse_R: Tensor

    @staticmethod
    def make(count_Pe: Tensor, num_rows: int) -> "SegmentPermutation":
        start_Pe = starts_of(count_Pe.flatten()).view_as(count_Pe)
        index_R = index_of_segments(start_Pe.t().flatten(), count_Pe.t().flatten(), num_rows)
        inverse_R = torch.empty_like(index_R).scatter_(0, index_R, torch.arange(num_rows, device=index_R.device))
        return SegmentPermutation(index_R, inverse_R)

    @counted("permute.segments")
    def forward(self, rows_RD: Tensor) -> Tensor:
        return permute_rows(rows_RD, self.index_R, self.inverse_R)

    def inverse(self, rows_RD: Tensor) -> Tensor:
        return permute_rows(rows_RD, self.inverse_R, self.index_R)


@dataclass(frozen=True)
class UniformPermutation:
    """Segments of equal length: a view and a transpose, no index."""

    num_ranks: int
    num_experts: int

    @counted("permute.uniform")
    def forward(self, rows_RD: Tensor) -> Tensor:
        return _swap(rows_RD, self.num_ranks, self.num_experts)

    def inverse(self, rows_RD: Tensor) -> Tensor:
        return _swap(rows_RD, self.num_experts, self.num_ranks)


def _swap(rows_RD: Tensor, outer: int, inner: int) -> Tensor:
    R, D = rows_RD.shape
    return rows_RD.view(outer, inner, R // (outer * inner), D).transpose(0, 1).reshape(R, D)


def starts_of(length_S: Tensor) -> Tensor:
    """(S,) -> (S,): where each of S consecutive segments starts."""
    return length_S.cumsum(0) - length_S


def index_of_segments(start_S: Tensor, length_S: Tensor, output_size: int | None = None) -> Tensor:
    """The indices start, start + 1, ... of each segment in turn, output_size of them in all.

    Pass output_size if the total is known on the host: without it, it is read from the device.
    """
    shift_R = torch.repeat_interleave(start_S - starts_of(length_S), length_S, output_size=output_size)
    return shift_R + torch.arange(shift_R.shape[0] if output_size is None else output_size, device=start_S.device)
