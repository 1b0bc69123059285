"""Grouped matmuls with 8-bit operands, on any kernel that has `matmul`; see `ops/low_precision.py`.

R rows sorted by expert, e experts, I inputs, O outputs. The gradient of the weights sums over the rows of each expert,
so its scales are along the rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from spurline.moe.kernels.grouped import grouped_matmul, grouped_outer
from spurline.ops.low_precision import LowPrecision, round_groups, round_operand


class _GroupedMatmul(Function):
    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor, kernel: str, *precision: str) -> Tensor:
        ctx.save_for_backward(rows_RI, w_eOI, count_e)
        ctx.kernel, (ctx.recipe, ctx.grad_dtype) = kernel, precision
        rows, w = round_operand(rows_RI, ctx.recipe, "e4m3", 1), round_operand(w_eOI, ctx.recipe, "e4m3", 2)
        return grouped_matmul(rows, w, count_e, kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
        rows_RI, w_eOI, count_e = ctx.saved_tensors
        recipe, dtype = ctx.recipe, ctx.grad_dtype
        drows = dw = None
        if ctx.needs_input_grad[0]:
            grad, w = round_operand(grad_RO, recipe, dtype, 1), round_operand(w_eOI, recipe, "e4m3", 1)
            drows = grouped_matmul(grad, w.transpose(-2, -1), count_e, ctx.kernel)
        if ctx.needs_input_grad[1]:
            grad, rows = round_groups(grad_RO, count_e, recipe, dtype), round_groups(rows_RI, count_e, recipe, "e4m3")
            dw = grouped_outer(grad, rows, count_e, ctx.kernel)
        return drows, dw, None, None, None, None


def low_precision_matmul(
    rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor, kernel: str, precision: LowPrecision
) -> Tensor:
    """(R, I) and (e, O, I) -> (R, O): each row times the transposed matrix of its expert."""
    if precision.native:
        from spurline.ops.torchao_products import native_grouped_matmul

        return native_grouped_matmul(rows_RI, w_eOI, count_e, precision)
    return _GroupedMatmul.apply(rows_RI, w_eOI, count_e, kernel, precision.recipe, precision.grad_dtype)
