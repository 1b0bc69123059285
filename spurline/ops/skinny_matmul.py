"""Tall-skinny matmuls on a CPU: a few rows times a large matrix. R rows, I inputs, O outputs.

With few rows on the left, BLAS reads the matrix on one thread and at half the memory bandwidth. With the matrix on the
left and the rows as columns, it reads at full memory bandwidth, on all threads. A single row is slow on either side,
and faster together with a second one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_ROWS, MOST_ROWS_ON_ONE_THREAD = 8, 3
"""Number of rows up to which it is faster to have them as columns."""
LARGE = 1 << 16
"""Number of elements from which on a matrix is large."""
WIDEST_PAIR = 1024
"""Number of inputs up to which two rows are faster than one, on one thread."""


def most_skinny_rows(matrix_OI: Tensor, dtype: torch.dtype | None = None) -> int:
    """Up to how many rows should be columns: 0 unless the matrix is large, contiguous and multiplied in float32."""
    if matrix_OI.numel() < LARGE or matrix_OI.device.type != "cpu" or not matrix_OI.is_contiguous():
        return 0
    if (dtype or matrix_OI.dtype) != torch.float32:
        return 0
    return MOST_ROWS if torch.get_num_threads() > 1 else MOST_ROWS_ON_ONE_THREAD


def least_rows(num_inputs: int) -> int:
    """2 if a single row should be multiplied together with another; else 1."""
    return 2 if num_inputs <= WIDEST_PAIR or torch.get_num_threads() > 1 else 1


def skinny_linear(x: Tensor, matrix_OI: Tensor) -> Tensor:
    """(..., I) -> (..., O), as `F.linear` without gradients: few rows are multiplied as columns."""
    num_rows = x.shape[:-1].numel()
    if torch.compiler.is_compiling() or not 0 < num_rows <= most_skinny_rows(matrix_OI):
        return F.linear(x, matrix_OI)
    rows_RI = x.reshape(num_rows, -1)
    if num_rows < least_rows(rows_RI.shape[1]):
        rows_RI = rows_RI.repeat(2, 1)
    product_OR = torch.mm(matrix_OI, rows_RI.t())
    return product_OR[:, :num_rows].t().reshape(*x.shape[:-1], -1).contiguous()


def linear(x: Tensor, matrix_OI: Tensor) -> Tensor:
    """(..., I) -> (..., O): `F.linear`, or `skinny_linear` where gradients are off."""
    return F.linear(x, matrix_OI) if torch.is_grad_enabled() else skinny_linear(x, matrix_OI)
