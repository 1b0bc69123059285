"""Rotary position embedding: pairs of channels turn by an angle that grows with the position.

Which channels make a pair is a convention of each family: neighbours (`apply_rope`), or a channel of the first half and
one of the second (`apply_rope_halves`). P pairs are R = 2 * P channels. The tables follow from the positions of each
forward pass, and all blocks share them: nothing to store, shard or rebuild.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

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
    return _rotate(x_BLHR, cos_LP, sin_LP, neighbours=True).to(x_BLHR.dtype)


def apply_rope_halves(x_BLHR: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
    """The same with channels (0, P), (1, P + 1), ... as the pairs: (B, L, H, R) -> (B, L, H, R)."""
    return _rotate(x_BLHR, cos_LP, sin_LP, neighbours=False).to(x_BLHR.dtype)


def _rotate(x_BLHR: Tensor, cos_LP: Tensor, sin_LP: Tensor, neighbours: bool) -> Tensor:
    cos_L1P, sin_L1P = cos_LP.unsqueeze(-2), sin_LP.unsqueeze(-2)  # one angle for all heads
    if not torch.compiler.is_compiling():
        return _Rotation.apply(x_BLHR, cos_L1P, sin_L1P, neighbours)
    first, second = x_BLHR.unflatten(-1, (-1, 2)).unbind(-1) if neighbours else x_BLHR.chunk(2, dim=-1)
    rotated = first * cos_L1P - second * sin_L1P, first * sin_L1P + second * cos_L1P
    return torch.stack(rotated, dim=-1).flatten(-2) if neighbours else torch.cat(rotated, dim=-1)


class _Rotation(Function):
    """In few passes; the gradient is the gradient turned back."""

    @staticmethod
    def forward(ctx: Any, x_BLHR: Tensor, cos_L1P: Tensor, sin_L1P: Tensor, neighbours: bool) -> Tensor:
        ctx.save_for_backward(cos_L1P, sin_L1P)
        ctx.neighbours = neighbours
        return _turn(x_BLHR, cos_L1P, sin_L1P, neighbours)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHR: Tensor) -> tuple[Tensor, None, None, None]:
        cos_L1P, sin_L1P = ctx.saved_tensors
        return _turn(grad_BLHR, cos_L1P, -sin_L1P, ctx.neighbours), None, None, None


def _turn(x_BLHR: Tensor, cos_L1P: Tensor, sin_L1P: Tensor, neighbours: bool) -> Tensor:
    dtype = torch.promote_types(x_BLHR.dtype, cos_L1P.dtype)
    if neighbours:  # the parts of a complex number, and turning is to multiply with another one
        pairs_BLHP = torch.view_as_complex(x_BLHR.to(dtype).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs_BLHP * torch.complex(cos_L1P, sin_L1P)).flatten(-2)
    turned_BLHR = torch.empty(x_BLHR.shape, dtype=dtype, device=x_BLHR.device)
    (x_first, x_second), (first, second) = x_BLHR.chunk(2, dim=-1), turned_BLHR.chunk(2, dim=-1)
    torch.mul(x_first, cos_L1P, out=first).addcmul_(x_second, sin_L1P, value=-1)
    torch.mul(x_first, sin_L1P, out=second).addcmul_(x_second, cos_L1P)
    return turned_BLHR
