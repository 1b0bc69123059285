"""Aligned groups: the rows of each expert padded to a multiple, as low-precision grouped matmuls require.

P ranks of the group, e experts on this rank, R rows received, A >= R places sorted by expert. Empty places hold a
sentinel: row number R, a row of zeros that is never stored and is dropped on the way back. The experts' output for it
may be anything: it reaches no token, and gets no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from spurline.moe.dispatch.permute import Permutation, SegmentPermutation, index_of_segments, starts_of
from spurline.moe.rows import RowCounts
from spurline.moe.telemetry import counted
from spurline.ops.rows import pad_rows, unpad_rows

N = TypeVar("N", int, Tensor)


@dataclass(frozen=True)
class AlignedPermutation:
    """Rows sorted by expert, with each expert's rows padded with zeros."""

    place_R: Tensor
    """The place of each row, in the order in which rows arrived."""
    num_places: int

    @staticmethod
    def around(permutation: Permutation, counts: RowCounts, places: RowCounts, num_places: int) -> AlignedPermutation:
        """`permutation` followed by padding: `counts` rows of each expert spread over its `places`.

        It must have an index: a view of rank-major rows (`UniformPermutation`) has none to invert.
        """
        if not isinstance(permutation, SegmentPermutation):
            raise ValueError(
                f"AlignedPermutation pads rows that are moved by an index, not by a {type(permutation).__name__}, which"
                " is a view of rank-major rows and has no index to invert: use SegmentPermutation.make"
            )
        if permutation.index_R.dim() != 1 or permutation.index_R.shape != permutation.inverse_R.shape:
            raise ValueError(
                "AlignedPermutation takes an index of one dimension and its inverse, got shapes"
                f" {tuple(permutation.index_R.shape)} and {tuple(permutation.inverse_R.shape)}: a rank-major view of"
                " an index can't be inverted"
            )
        place_R = places_of(counts.count_e, places.count_e, permutation.index_R.shape[0])
        return AlignedPermutation(place_R.index_select(0, permutation.inverse_R), num_places)

    @counted(lambda permutation, rows_RD: permutation.paths(rows_RD))
    def forward(self, rows_RD: Tensor) -> Tensor:
        """(R, D) -> (A, D), zeros in empty places."""
        return pad_rows(rows_RD, self.place_R, self.num_places)

    def inverse(self, rows_AD: Tensor) -> Tensor:
        """(A, D) -> (R, D)."""
        return unpad_rows(rows_AD, self.place_R)

    def paths(self, rows_RD: Tensor) -> dict[str, int]:
        """For the counters. Weights, a single column that is permuted like its rows, are not counted again."""
        if rows_RD.shape[1] == 1:
            return {}
        return {"permute.aligned": 1, "permute.aligned.padding_rows": self.num_places - rows_RD.shape[0]}


def round_up(number: N, multiple: int) -> N:
    """Round a number, or each element of a tensor, up to a multiple."""
    return (number + multiple - 1) // multiple * multiple


def most_places(num_rows: int, num_experts: int, multiple: int) -> int:
    """Places that are enough for this many rows, however they are distributed over experts."""
    return (num_rows + num_experts * (multiple - 1)) // multiple * multiple


def align_counts(counts: RowCounts, multiple: int, enough: int | None = None) -> tuple[RowCounts, int]:
    """The places of each expert, and their total: each a multiple, zero for an expert without rows.

    If only the device knows the counts, the total is `enough`, and the last expert gets the places that are left over.
    Without `enough`, counts must be on the host.
    """
    place_e = round_up(counts.count_e, multiple)
    if counts.host_e is None and enough is not None:
        rest = enough - place_e.sum()
        place_e = torch.cat([place_e[:-1], place_e[-1:] + rest])
        return RowCounts(place_e), enough
    host_place_e = None if counts.host_count_e is None else round_up(counts.host_count_e, multiple)
    if counts.host_e is None:
        assert host_place_e is not None, "the number of places is to be known, and nobody has counts on the host"
        num_places = int(host_place_e.sum().item())  # traced: one symbol
        torch._check(num_places >= 0)
        return RowCounts(place_e, host_count_e=host_place_e), num_places
    host_e = [round_up(count, multiple) for count in counts.host_e]
    fewest_and_most = counts.group_range
    if fewest_and_most is not None:
        fewest_and_most = round_up(fewest_and_most[0], multiple), round_up(fewest_and_most[1], multiple)
    return RowCounts(place_e, host_e, fewest_and_most, host_place_e), sum(host_e)


def places_of(count_e: Tensor, place_e: Tensor, num_rows: int) -> Tensor:
    """(R,): the place of each row, with rows sorted by expert; each expert's rows fill its first places."""
    return index_of_segments(starts_of(place_e), count_e, num_rows)


def fill_places(place_R: Tensor, value_R: Tensor, num_places: int, sentinel: int) -> Tensor:
    """(A,): the value of the row in each place, and `sentinel` in empty places."""
    return value_R.new_full((num_places,), sentinel).index_copy(0, place_R, value_R)
