"""Rotary position embedding (RoPE): pairs of channels are rotated by an angle proportional to the position.

Which channels make a pair depends on the family: adjacent ones (`apply_rope`), or a channel of the first half and one
of the second (`apply_rope_halves`). P pairs are R = 2 * P channels. The tables are computed from the positions in each
forward pass and shared by all blocks, so there is no buffer to store or shard.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from spurline.models.common.decoder_config import Llama3RopeConfig, YarnConfig

Rope = tuple[Tensor, Tensor]
"""Cosine and sine of every pair's angle: two of (L, P), or of (B, L, P) if positions differ within a batch."""


def rope_frequencies(
    dim: int,
    theta: float,
    device: torch.device,
    yarn: YarnConfig | None = None,
    llama3: Llama3RopeConfig | None = None,
) -> Tensor:
    """The rotary frequency of each of the dim / 2 pairs, theta ** (-2i / dim): (P,)."""
    frequency_P = theta ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
    # slowed_P is 0 for pairs that keep their frequency and 1 for pairs whose frequency is divided by the full factor.
    if yarn is not None and yarn.factor > 1:
        slowed_P = _slowed_by_yarn(dim, theta, device, yarn)
        return frequency_P * (1 - slowed_P + slowed_P / yarn.factor)
    if llama3 is not None and llama3.factor > 1:
        times_P = frequency_P * (llama3.original_seq_len / (2 * math.pi))
        span = llama3.high_freq_factor - llama3.low_freq_factor
        slowed_P = ((llama3.high_freq_factor - times_P) / span).clamp(0, 1)
        return frequency_P * (1 - slowed_P + slowed_P / llama3.factor)
    return frequency_P


def _slowed_by_yarn(dim: int, theta: float, device: torch.device, yarn: YarnConfig) -> Tensor:
    first, last = (_pair_that_rotates(beta, dim, theta, yarn) for beta in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    pair_P = torch.arange(dim // 2, device=device, dtype=torch.float32)
    return ((pair_P - first) / max(last - first, 1e-3)).clamp(0, 1)


def _pair_that_rotates(times: float, dim: int, theta: float, yarn: YarnConfig) -> float:
    """Fractional index of the pair that rotates `times` times within the original length."""
    return dim * math.log(yarn.original_seq_len / (2 * math.pi * times)) / (2 * math.log(theta))


def rope_tables(
    positions_L: Tensor,
    dim: int,
    theta: float,
    yarn: YarnConfig | None = None,
    llama3: Llama3RopeConfig | None = None,
) -> Rope:
    """Cosine and sine of every pair's angle at each position: (L,) or (B, L) -> two of (.., L, P), float32."""
    frequency_P = rope_frequencies(dim, theta, positions_L.device, yarn, llama3)
    angle_LP = positions_L.float().unsqueeze(-1) * frequency_P
    scale = 1.0 if yarn is None else yarn.rotated_scale
    return angle_LP.cos() * scale, angle_LP.sin() * scale


def apply_rope(x_BLHR: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
    """Rotate channels (0, 1), (2, 3), ... by the angle of their position: (B, L, H, R) -> (B, L, H, R).

    The float32 tables promote the products to float32; only the result is rounded to the dtype of x.
    """
    return _rotate(x_BLHR, cos_LP, sin_LP, adjacent=True).to(x_BLHR.dtype)


def apply_rope_halves(x_BLHR: Tensor, cos_LP: Tensor, sin_LP: Tensor) -> Tensor:
    """The same with channels (0, P), (1, P + 1), ... as the pairs: (B, L, H, R) -> (B, L, H, R)."""
    return _rotate(x_BLHR, cos_LP, sin_LP, adjacent=False).to(x_BLHR.dtype)


def _rotate(x_BLHR: Tensor, cos_LP: Tensor, sin_LP: Tensor, adjacent: bool) -> Tensor:
    cos_L1P, sin_L1P = cos_LP.unsqueeze(-2), sin_LP.unsqueeze(-2)  # one angle for all heads
    if not torch.compiler.is_compiling():
        return _Rotation.apply(x_BLHR, cos_L1P, sin_L1P, adjacent)
    first, second = x_BLHR.unflatten(-1, (-1, 2)).unbind(-1) if adjacent else x_BLHR.chunk(2, dim=-1)
    rotated = first * cos_L1P - second * sin_L1P, first * sin_L1P + second * cos_L1P
    return torch.stack(rotated, dim=-1).flatten(-2) if adjacent else torch.cat(rotated, dim=-1)


class _Rotation(Function):
    """Rotation in few passes over memory; the backward pass rotates the gradient by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x_BLHR: Tensor, cos_L1P: Tensor, sin_L1P: Tensor, adjacent: bool) -> Tensor:
        ctx.save_for_backward(cos_L1P, sin_L1P)
        ctx.adjacent = adjacent
        return _rotate_in_one_pass(x_BLHR, cos_L1P, sin_L1P, adjacent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BLHR: Tensor) -> tuple[Tensor, None, None, None]:
        cos_L1P, sin_L1P = ctx.saved_tensors
        return _rotate_in_one_pass(grad_BLHR, cos_L1P, -sin_L1P, ctx.adjacent), None, None, None


def _rotate_in_one_pass(x_BLHR: Tensor, cos_L1P: Tensor, sin_L1P: Tensor, adjacent: bool) -> Tensor:
    dtype = torch.promote_types(x_BLHR.dtype, cos_L1P.dtype)
    if adjacent:  # a pair is a complex number, and a rotation multiplies it by another one
        pairs_BLHP = torch.view_as_complex(x_BLHR.to(dtype).unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs_BLHP * torch.complex(cos_L1P, sin_L1P)).flatten(-2)
    rotated_BLHR = torch.empty(x_BLHR.shape, dtype=dtype, device=x_BLHR.device)
    (x_first, x_second), (first, second) = x_BLHR.chunk(2, dim=-1), rotated_BLHR.chunk(2, dim=-1)
    torch.mul(x_first, cos_L1P, out=first).addcmul_(x_second, sin_L1P, value=-1)
    torch.mul(x_first, sin_L1P, out=second).addcmul_(x_second, cos_L1P)
    return rotated_BLHR
