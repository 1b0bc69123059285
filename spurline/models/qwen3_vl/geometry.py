"""Positions of patches in their images and of images in their sequences, all computed on the host.

I images of N patches in total, P of them in the largest; B sequences of L positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from spurline.data.batch import Spot
from spurline.data.patch_sizes import MERGE


class Padding(NamedTuple):
    """Index tensors between packed patches (N,) and images padded to one size (I, P)."""

    patch_X: Tensor
    """Which patch fills each of the I * P places; patch 0 where there is padding."""
    is_real_I11P: Tensor
    place_N: Tensor
    """Which of the I * P places each patch fills."""


def patch_places(spots: Sequence[Spot]) -> Tensor:
    """Row and column of every patch in its image, in patch order: (N, 2)."""

    def of_picture(spot: Spot) -> Tensor:
        axes = torch.meshgrid(torch.arange(spot.height), torch.arange(spot.width), indexing="ij")
        blocks = torch.stack(axes, dim=-1).unflatten(1, (-1, MERGE)).unflatten(0, (-1, MERGE))
        return blocks.transpose(1, 2).flatten(0, 3)

    return torch.cat([of_picture(spot) for spot in spots])


def table_points(spots: Sequence[Spot], place_N2: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The four grid points around each patch, and their bilinear weights: two of (N, 4).

    The grid has side x side points. The corners of an image lie on the corners of the grid, whatever its size.
    """
    size_I2 = torch.tensor([(spot.height, spot.width) for spot in spots])
    size_N2 = size_I2.repeat_interleave(torch.tensor([spot.num_patches for spot in spots]), dim=0)
    exact_N2 = place_N2 * (side - 1) / (size_N2 - 1)
    low_N2 = exact_N2.floor()
    near_N22 = torch.stack([low_N2, (low_N2 + 1).clamp(max=side - 1)], dim=-1).long()
    share_N22 = torch.stack([1 - (exact_N2 - low_N2), exact_N2 - low_N2], dim=-1)
    (row_N2, column_N2), (down_N2, across_N2) = near_N22.unbind(1), share_N22.unbind(1)
    point_N4 = (row_N2.unsqueeze(2) * side + column_N2.unsqueeze(1)).flatten(1)
    return point_N4, (down_N2.unsqueeze(2) * across_N2.unsqueeze(1)).flatten(1)


def padding_of(spots: Sequence[Spot]) -> Padding:
    size_I = torch.tensor([spot.num_patches for spot in spots])
    first_I1 = (size_I.cumsum(0) - size_I).unsqueeze(1)
    number_P = torch.arange(int(size_I.max()))
    is_real_IP = number_P < size_I.unsqueeze(1)
    patch_X = torch.where(is_real_IP, first_I1 + number_P, 0).flatten()
    return Padding(patch_X, is_real_IP[:, None, None], is_real_IP.flatten().nonzero().squeeze(1))


def sequence_positions(spots: Sequence[Spot], B: int, L: int) -> Tensor:
    """Time, height and width of every position of the sequences: (3, B, L).

    For text, all three increase together. The features of an image share the time at which it starts, and their rows
    and columns count from there; what follows continues after the larger of its sides.
    """
    position_ABL = torch.arange(L).expand(3, B, L).clone()
    for spot in sorted(spots, key=lambda spot: (spot.row, spot.start)):
        stop = spot.start + spot.num_features
        begin = int(position_ABL[0, spot.row, spot.start])
        height, width = spot.height // MERGE, spot.width // MERGE
        row_HW, column_HW = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        inside_AHW = torch.stack([torch.zeros_like(row_HW), row_HW, column_HW])
        position_ABL[:, spot.row, spot.start : stop] = begin + inside_AHW.flatten(1)
        position_ABL[:, spot.row, stop:] = begin + max(height, width) + torch.arange(L - stop)
    return position_ABL


def feature_of_position(spots: Sequence[Spot], B: int, L: int) -> Tensor:
    """Index of the visual feature at each position, -1 for text: (B, L)."""
    feature_BL = torch.full((B, L), -1)
    num_before = 0
    for spot in spots:
        stop = spot.start + spot.num_features
        assert stop <= L, f"a picture ends at position {stop} of a sequence of {L}"
        feature_BL[spot.row, spot.start : stop] = torch.arange(num_before, num_before + spot.num_features)
        num_before += spot.num_features
    return feature_BL
