"""Rotary position embedding, in the interleaved convention: channels (0, 1), (2, 3), ... are the pairs that rotate.

P pairs are R = 2 * P channels. The tables follow from the positions on each call: nothing to store, shard or rebuild.
"""

import torch
from torch import Tensor


def rope_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """Angle by which each of the dim / 2 pairs turns from one position to the next: theta ** (-2i / dim), (P,)."""
    return theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)


def rope_tables(positions_L: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair's angle at each position: (L,) -> two of (L, P), float32."""
    angle_LP = torch.outer(positions_L.float(), rope_frequencies(dim, theta, positions_L.device))
    return angle_LP.cos(), angle_LP.sin()


def apply_rope(x_BLHR: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
    """Rotate each pair of channels by the angle of its position: (B, L, H, R) -> (B, L, H, R).

    The float32 tables lift the products to float32; only the result is rounded to the dtype of x.
    """
    even_BLHP, odd_BLHP = x_BLHR.unflatten(-1, (-1, 2)).unbind(-1)
    cos_LHP, sin_LHP = cos_LP.unsqueeze(1), sin_LP.unsqueeze(1)
    pairs = (even_BLHP * cos_LHP - odd_BLHP * sin_LHP, even_BLHP * sin_LHP + odd_BLHP * cos_LHP)
    return torch.stack(pairs, dim=-1).flatten(-2).to(x_BLHR.dtype)
