"""Rotary position embedding: pairs of channels turn by an angle that grows with the position.

Which channels make a pair is a convention of each family: neighbours (`apply_rope`), or a channel of the first half and
one of the second (`apply_rope_halves`). P pairs are R = 2 * P channels. The tables follow from the positions of each
forward pass, and all blocks share them: nothing to store, shard or rebuild.
"""

import math

import torch
from torch import Tensor

from spurline.models.common.decoder_config import YarnConfig

Rope = tuple[Tensor, Tensor]
"""Cosine and sine of every pair's angle: two of (L, P), or of (B, L, P) where rows of a batch differ in positions."""


def rope_frequencies(dim: int, theta: float, device: torch.device, yarn: YarnConfig | None = None) -> Tensor:
    """Angle by which each of the dim / 2 pairs turns from one position to the next: theta ** (-2i / dim), (P,)."""
    frequency_P = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    if yarn is None or yarn.factor == 1:
        return frequency_P
    first = max(math.floor(_pair_that_turns(yarn.beta_fast, dim, theta, yarn)), 0)
    last = min(math.ceil(_pair_that_turns(yarn.beta_slow, dim, theta, yarn)), dim - 1)
    # From 0 at the pairs that keep their frequency to 1 at those that are slowed down by the whole factor.
    pair_P = torch.arange(dim // 2, device=device, dtype=torch.float32)
    slowed_P = ((pair_P - first) / max(last - first, 1e-3)).clamp(0, 1)
    return frequency_P * (1 - slowed_P + slowed_P / yarn.factor)


def _pair_that_turns(times: float, dim: int, theta: float, yarn: YarnConfig) -> float:
    """Number, with a fraction, of the pair that turns so many times within the original length."""
    return dim * math.log(yarn.original_seq_len / (2 * math.pi * times)) / (2 * math.log(theta))


def rope_tables(positions_L: Tensor, dim: int, theta: float, yarn: YarnConfig | None = None) -> Rope:
    """Cosine and sine of every pair's angle at each position: (L,) or (B, L) -> two of (.., L, P), float32."""
    angle_LP = positions_L.float().unsqueeze(-1) * rope_frequencies(dim, theta, positions_L.device, yarn)
    scale = 1.0 if yarn is None else yarn.rotated_scale
    return angle_LP.cos() * scale, angle_LP.sin() * scale


def apply_rope(x_BLHR: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
    """Rotate channels (0, 1), (2, 3), ... by the angle of their position: (B, L, H, R) -> (B, L, H, R).

    The float32 tables lift the products to float32; only the result is rounded to the dtype of x.
    """
    first_BLHP, second_BLHP = x_BLHR.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack(_rotate(first_BLHP, second_BLHP, cos_LP, sin_LP), dim=-1).flatten(-2).to(x_BLHR.dtype)


def apply_rope_halves(x_BLHR: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
    """The same with channels (0, P), (1, P + 1), ... as the pairs: (B, L, H, R) -> (B, L, H, R)."""
    first_BLHP, second_BLHP = x_BLHR.chunk(2, dim=-1)
    return torch.cat(_rotate(first_BLHP, second_BLHP, cos_LP, sin_LP), dim=-1).to(x_BLHR.dtype)


def _rotate(first_BLHP: Tensor, second_BLHP: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> tuple[Tensor, Tensor]:
    cos_L1P, sin_L1P = cos_LP.unsqueeze(-2), sin_LP.unsqueeze(-2)  # one angle for all heads
    return first_BLHP * cos_L1P - second_BLHP * sin_L1P, first_BLHP * sin_L1P + second_BLHP * cos_L1P
