"""Grouped matmuls as registered ops, on any kernel: each expert's rows times its weights.

R rows sorted by expert, e experts, I inputs, O outputs; `count_e` (int64) has the number of rows of each expert. Two
ops are enough and closed under differentiation: a matmul with the weights, and the weights' gradient (an outer product
per expert). So a kernel needs no autograd of its own, traces, and can be differentiated any number of times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spurline.moe.kernels.choose import kernel_named


@torch.library.custom_op("spurline::grouped_matmul", mutates_args=())
def grouped_matmul(rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor, kernel: str) -> Tensor:
    """(R, I) and (e, O, I) -> (R, O): each row times the transposed matrix of its expert."""
    return kernel_named(kernel).matmul(rows_RI, w_eOI, count_e)


@torch.library.custom_op("spurline::grouped_outer", mutates_args=())
def grouped_outer(a_RO: Tensor, b_RI: Tensor, count_e: Tensor, kernel: str) -> Tensor:
    """(R, O) and (R, I) -> (e, O, I): each expert's a^T b; zeros for an expert without rows."""
    return kernel_named(kernel).outer(a_RO, b_RI, count_e)


@grouped_matmul.register_fake
def _(rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor, kernel: str) -> Tensor:
    return rows_RI.new_empty(rows_RI.shape[0], w_eOI.shape[1])


@grouped_outer.register_fake
def _(a_RO: Tensor, b_RI: Tensor, count_e: Tensor, kernel: str) -> Tensor:
    return a_RO.new_empty(count_e.shape[0], a_RO.shape[1], b_RI.shape[1])


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    first, second, count_e, ctx.kernel = inputs
    ctx.save_for_backward(first, second, count_e)


def _matmul_backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, ...]:
    rows_RI, w_eOI, count_e = ctx.saved_tensors
    need_rows, need_w, *_ = ctx.needs_input_grad
    grad_rows = grouped_matmul(grad_RO, w_eOI.transpose(-2, -1), count_e, ctx.kernel) if need_rows else None
    grad_w = grouped_outer(grad_RO, rows_RI, count_e, ctx.kernel) if need_w else None
    return grad_rows, grad_w, None, None


def _outer_backward(ctx: Any, grad_eOI: Tensor) -> tuple[Tensor | None, ...]:
    a_RO, b_RI, count_e = ctx.saved_tensors
    need_a, need_b, *_ = ctx.needs_input_grad
    grad_a = grouped_matmul(b_RI, grad_eOI, count_e, ctx.kernel) if need_a else None
    grad_b = grouped_matmul(a_RO, grad_eOI.transpose(-2, -1), count_e, ctx.kernel) if need_b else None
    return grad_a, grad_b, None, None


grouped_matmul.register_autograd(_matmul_backward, setup_context=_save)
grouped_outer.register_autograd(_outer_backward, setup_context=_save)
