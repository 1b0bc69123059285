"""Rows that carry their routing weight in extra columns.

T tokens, S rows that leave, R rows that arrive, D width, X = D + 16 bytes. A weight is sent inside its row, in the
dtype of the rows, without a separate message: a float32 weight as the sum of three 16-bit numbers. Its gradient comes
back in the same way.

Three numbers of bfloat16, which has the exponents of float32, are exact above 1e-33. With float16 the sum is off by at
most 2**-25, the precision of its smallest numbers, and gradients beyond its largest number, 65504, are not finite, as
any other gradient of a float16 run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function

from spurline.ops.rows import scatter_add_rows

COLUMN_BYTES = 16
"""Bytes that a weight takes in a row: rows stay a multiple of 16 bytes, which kernels load fastest."""


@torch.library.custom_op("spurline::gather_weighted_rows", mutates_args=())
def gather_weighted_rows(x_TD: Tensor, token_S: Tensor, weight_S: Tensor) -> Tensor:
    """(T, D), (S,) and (S,) -> (S, X): row s is token token_S[s], followed by weight_S[s]."""
    rows_SX = x_TD.new_empty(token_S.shape[0], joined_width(x_TD))
    torch.index_select(x_TD, 0, token_S, out=rows_SX[:, : x_TD.shape[1]])
    rows_SX[:, x_TD.shape[1] :] = _columns(weight_S, rows_SX.dtype)
    return rows_SX


@gather_weighted_rows.register_fake
def _(x_TD: Tensor, token_S: Tensor, weight_S: Tensor) -> Tensor:
    return x_TD.new_empty(token_S.shape[0], joined_width(x_TD))


def split_weighted_rows(rows_RX: Tensor, width: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(R, X) -> (R, D), a view, and (R,): the rows and their weights."""
    return _Split.apply(rows_RX, width, weight_dtype)


def joined_width(x_TD: Tensor) -> int:
    """X: the number of columns of a row that carries its weight."""
    return x_TD.shape[1] + COLUMN_BYTES // x_TD.dtype.itemsize


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, rows_RX: Tensor, width: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.dtype = rows_RX.dtype
        return rows_RX[:, :width], _weights(rows_RX, width, weight_dtype)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, grad_R: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat([grad_RD, _columns(grad_R, ctx.dtype)], dim=1), None, None


def _columns(weight_S: Tensor, dtype: torch.dtype) -> Tensor:
    """(S,) -> (S, X - D): numbers of dtype that add up to the weight, and zeros."""
    parts, rest_S = [], weight_S
    for _ in range(_num_parts(weight_S.dtype, dtype)):
        parts.append(rest_S.to(dtype))
        rest_S = rest_S - parts[-1].to(rest_S.dtype)  # exact: a number and its rounding differ by less than both
    # Zeros as columns like the others: F.pad would read the number of rows, which is unknown while tracing.
    parts += [torch.zeros_like(parts[0])] * (COLUMN_BYTES // dtype.itemsize - len(parts))
    return torch.stack(parts, dim=1)


def _weights(rows_RX: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(R, X) -> (R,): the inverse of `_columns`, summed from the largest part down, which is exact."""
    num_parts = _num_parts(dtype, rows_RX.dtype)
    first_R, *rest = rows_RX[:, width : width + num_parts].to(dtype).unbind(1)
    return sum(rest, first_R)


def _num_parts(weight: torch.dtype, rows: torch.dtype) -> int:
    return 1 if weight.itemsize <= rows.itemsize else 3


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    x_TD, token_S, weight_S = inputs
    ctx.save_for_backward(token_S)
    ctx.shape, ctx.weight_dtype = x_TD.shape, weight_S.dtype


def _backward(ctx: Any, grad_SX: Tensor) -> tuple[Tensor, None, Tensor]:
    (token_S,) = ctx.saved_tensors
    num_tokens, width = ctx.shape
    # Full rows: summing only part of the columns is four times slower on a CPU. The weight columns are discarded.
    grad_TD = scatter_add_rows(grad_SX, token_S, num_tokens)[:, :width]
    return grad_TD, None, _weights(grad_SX, width, ctx.weight_dtype)


gather_weighted_rows.register_autograd(_backward, setup_context=_save)
