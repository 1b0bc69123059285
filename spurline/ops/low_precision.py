"""Matmuls with operands rounded to 8 bits: float8 with a scale per row, MXFP8 with a scale per 32 numbers.

Scales are powers of two along the reduction dim of a matmul, so each operand is rounded once for every matmul that it
is used in. Here the rounded operands are multiplied in the dtype of the activations, which represents them exactly: the
result equals that of a device with 8-bit matmuls, up to summation order. Rounding matches torchao bit for bit.

float8   scale = largest power of two with |x| * scale <= the largest float8 number, for each row (or column)
mxfp8    e8m0 scale (rounded up) for each block of 32 along the reduction dim

R rows, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from spurline.ops.skinny_matmul import linear as plain_linear

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCK = 32
"""Numbers that share a scale in MXFP8."""
_LEAST = 1e-12


class LowPrecision(NamedTuple):
    """The precision of a layer's matmuls."""

    recipe: str
    """float8 or mxfp8."""
    grad_dtype: str = "e4m3"
    """What gradients are rounded to: e4m3 or e5m2. Activations and weights are always e4m3."""
    native: bool = False
    """Whether the device multiplies in 8 bits, by torchao; else rounded operands are multiplied in their own dtype."""


def float8_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor for numbers up to `largest`: a power of two."""
    scale = (torch.finfo(dtype).max / largest.double().clamp_min(_LEAST)).float()
    return torch.exp2(torch.floor(torch.log2(scale)))


def mx_scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor for numbers up to `largest`: the reciprocal of an e8m0 scale, which is rounded up."""
    exponent = torch.ceil(torch.log2(largest.float() / torch.finfo(dtype).max)).clamp(-127, 127)
    # An exponent of -127 means zeros, which stay zero.
    return torch.where(exponent == -127, 1.0, torch.exp2(-exponent))


_SCALES = {"float8": float8_scale, "mxfp8": mx_scale}


def _round(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale converted to 8 bits, saturated, and back to the dtype of x."""
    most = torch.finfo(dtype).max
    return ((x.float() * scale).clamp(-most, most).to(dtype).float() / scale).to(x.dtype)


@torch.library.custom_op("spurline::round_operand", mutates_args=())
def round_operand(x: Tensor, recipe: str, dtype: str, dim: int) -> Tensor:
    """x rounded to 8 bits, with scales along dim: one, or one for each block of 32."""
    moved, to = x.movedim(dim, -1), DTYPES[dtype]
    if recipe == "float8":
        rounded = _round(moved, float8_scale(moved.abs().amax(-1, keepdim=True), to), to) if x.numel() else moved
    else:
        length = moved.shape[-1]
        padded = torch.nn.functional.pad(moved, (0, -length % BLOCK))
        blocks = padded.reshape(*moved.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)
        scale = mx_scale(blocks.abs().amax(-1, keepdim=True), to)
        rounded = _round(blocks, scale, to).reshape(padded.shape)[..., :length]
    return rounded.movedim(-1, dim).clone(memory_format=torch.contiguous_format)


@torch.library.custom_op("spurline::round_groups", mutates_args=())
def round_groups(rows_RI: Tensor, count_e: Tensor, recipe: str, dtype: str) -> Tensor:
    """(R, I) rounded with scales along the rows of each expert: one, or one per 32 rows; no device-to-host read."""
    num_rows, num_experts = rows_RI.shape[0], count_e.shape[0]
    if not num_rows:
        return rows_RI.clone()
    count_e = count_e.to(rows_RI.device)
    rows = torch.arange(num_rows, device=rows_RI.device)
    expert_R = torch.searchsorted(count_e.cumsum(0), rows, right=True).clamp_max(num_experts - 1)
    group_R, num_groups = expert_R, num_experts
    if recipe == "mxfp8":
        blocks_e = (count_e + BLOCK - 1) // BLOCK
        place_R = rows - (count_e.cumsum(0) - count_e)[expert_R]
        group_R = (blocks_e.cumsum(0) - blocks_e)[expert_R] + place_R // BLOCK
        num_groups = num_rows // BLOCK + num_experts
    index_RI = group_R.unsqueeze(1).expand_as(rows_RI)
    largest_GI = rows_RI.new_zeros(num_groups, rows_RI.shape[1]).scatter_reduce_(0, index_RI, rows_RI.abs(), "amax")
    scale_GI = _SCALES[recipe](largest_GI, DTYPES[dtype])
    return _round(rows_RI, scale_GI.index_select(0, group_R), DTYPES[dtype])


@round_operand.register_fake
def _(x: Tensor, recipe: str, dtype: str, dim: int) -> Tensor:
    return x.new_empty(x.shape)


@round_groups.register_fake
def _(rows_RI: Tensor, count_e: Tensor, recipe: str, dtype: str) -> Tensor:
    return rows_RI.new_empty(rows_RI.shape)


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, w_OI: Tensor, recipe: str, grad_dtype: str) -> Tensor:
        ctx.save_for_backward(x_RI, w_OI)
        ctx.recipe, ctx.grad_dtype = recipe, grad_dtype
        return round_operand(x_RI, recipe, "e4m3", 1) @ round_operand(w_OI, recipe, "e4m3", 1).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RI, w_OI = ctx.saved_tensors
        recipe, dtype = ctx.recipe, ctx.grad_dtype
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = round_operand(grad_RO, recipe, dtype, 1) @ round_operand(w_OI, recipe, "e4m3", 0)
        if ctx.needs_input_grad[1]:
            dw = round_operand(grad_RO, recipe, dtype, 0).t() @ round_operand(x_RI, recipe, "e4m3", 0)
        return dx, dw, None, None


def linear(x: Tensor, w_OI: Tensor, precision: LowPrecision | None = None) -> Tensor:
    """(..., I) -> (..., O): x times the transposed matrix, in 8 bits if the layer has such a precision."""
    if precision is None:
        return plain_linear(x, w_OI)
    x_RI = x.reshape(-1, x.shape[-1])
    if precision.native:
        from spurline.ops.torchao_products import native_linear

        y_RO = native_linear(x_RI, w_OI, precision)
    else:
        y_RO = _Linear.apply(x_RI, w_OI, precision.recipe, precision.grad_dtype)
    # Not a view to autograd: FSDP2 warns about modules that return views.
    return torch.ops.aten._unsafe_view.default(y_RO, [*x.shape[:-1], w_OI.shape[0]])
