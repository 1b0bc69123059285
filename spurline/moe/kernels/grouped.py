"""Matrix products over groups of rows: rows of expert e meet the weights of expert e.

R rows sorted by expert, e experts, I inputs, O outputs; `count_e` (int64) says how many rows each expert has. Two ops
are enough, and closed under differentiation: a product with the weights, and the weights' gradient (an outer product
per expert). Each runs on one of two kernels: a loop over experts, or PyTorch's own grouped
matmul, which takes no empty matrices.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("spurline::grouped_matmul", mutates_args=())
def grouped_matmul(rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor, kernel: str) -> Tensor:
    """(R, I) and (e, O, I) -> (R, O): each row times the transposed weights of its expert."""
    if kernel == "grouped_mm" and rows_RI.shape[0]:
        return F.grouped_mm(rows_RI.contiguous(), _dense(w_eOI).transpose(-2, -1), offs=_offsets(count_e))
    out_RO = rows_RI.new_empty(rows_RI.shape[0], w_eOI.shape[1])
    start = 0
    for expert, num_rows in enumerate(_row_counts(count_e, rows_RI)):
        if num_rows:
            span = slice(start, start + num_rows)
            torch.mm(rows_RI[span], w_eOI[expert].t(), out=out_RO[span])
            start += num_rows
    return out_RO


@torch.library.custom_op("spurline::grouped_outer", mutates_args=())
def grouped_outer(a_RO: Tensor, b_RI: Tensor, count_e: Tensor, kernel: str) -> Tensor:
    """(R, O) and (R, I) -> (e, O, I): each expert's a^T b; zero for an expert without rows."""
    if kernel == "grouped_mm" and a_RO.shape[0]:
        return F.grouped_mm(a_RO.contiguous().t(), b_RI.contiguous(), offs=_offsets(count_e))
    out_eOI = a_RO.new_empty(count_e.shape[0], a_RO.shape[1], b_RI.shape[1])
    start = 0
    for expert, num_rows in enumerate(_row_counts(count_e, a_RO)):
        if num_rows:
            span = slice(start, start + num_rows)
            torch.mm(a_RO[span].t(), b_RI[span], out=out_eOI[expert])
            start += num_rows
        else:
            out_eOI[expert].zero_()
    return out_eOI


def grouped_mm_takes(dtype: torch.dtype, *widths: int) -> bool:
    """Whether PyTorch's grouped matmul multiplies rows of this dtype and these widths."""
    return dtype in (torch.float32, torch.bfloat16, torch.float16) and all(w * dtype.itemsize % 16 == 0 for w in widths)


def _row_counts(count_e: Tensor, rows: Tensor) -> list[int]:
    counts = count_e.tolist()
    assert sum(counts) == rows.shape[0], f"row counts add up to {sum(counts)}, but there are {rows.shape[0]} rows"
    return counts


def _offsets(count_e: Tensor) -> Tensor:
    return count_e.cumsum(0).to(torch.int32)


def _dense(w_eOI: Tensor) -> Tensor:
    """The weights as they are if they are dense in either order of their last two dims, else a copy."""
    return w_eOI if w_eOI.is_contiguous() or w_eOI.transpose(-2, -1).is_contiguous() else w_eOI.contiguous()


@grouped_matmul.register_fake
def _(rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor, kernel: str) -> Tensor:
    return rows_RI.new_empty(rows_RI.shape[0], w_eOI.shape[1])


@grouped_outer.register_fake
def _(a_RO: Tensor, b_RI: Tensor, count_e: Tensor, kernel: str) -> Tensor:
    return a_RO.new_empty(count_e.shape[0], a_RO.shape[1], b_RI.shape[1])


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    first, second, count_e, ctx.kernel = inputs
    ctx.save_for_backward(first, second, count_e)


def _matmul_backward(ctx, grad_RO):  # type: ignore[no-untyped-def]
    rows_RI, w_eOI, count_e = ctx.saved_tensors
    need_rows, need_w, *_ = ctx.needs_input_grad
    grad_rows = grouped_matmul(grad_RO, w_eOI.transpose(-2, -1), count_e, ctx.kernel) if need_rows else None
    grad_w = grouped_outer(grad_RO, rows_RI, count_e, ctx.kernel) if need_w else None
    return grad_rows, grad_w, None, None


def _outer_backward(ctx, grad_eOI):  # type: ignore[no-untyped-def]
    a_RO, b_RI, count_e = ctx.saved_tensors
    need_a, need_b, *_ = ctx.needs_input_grad
    grad_a = grouped_matmul(b_RI, grad_eOI, count_e, ctx.kernel) if need_a else None
    grad_b = grouped_matmul(a_RO, grad_eOI.transpose(-2, -1), count_e, ctx.kernel) if need_b else None
    return grad_a, grad_b, None, None


grouped_matmul.register_autograd(_matmul_backward, setup_context=_save)
grouped_outer.register_autograd(_outer_backward, setup_context=_save)
