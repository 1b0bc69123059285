"""Gather rows from tokens, and its mirror: add rows back to their tokens in a fixed order.

T tokens, R rows, A places for rows, D width. `token_R` is the token of each row. The gradient of one op is the other,
so both are deterministic in both directions, and both can be differentiated any number of times.
"""

import torch
from torch import Tensor


@torch.library.custom_op("spurline::gather_rows", mutates_args=())
def gather_rows(x_TD: Tensor, token_R: Tensor) -> Tensor:
    """(T, D) and (R,) -> (R, D): row r is token token_R[r]."""
    return x_TD.index_select(0, token_R)


@torch.library.custom_op("spurline::scatter_add_rows", mutates_args=())
def scatter_add_rows(rows_RD: Tensor, token_R: Tensor, num_tokens: int, base_TD: Tensor | None = None) -> Tensor:
    """(R, D) -> (T, D): the sum of each token's rows in row order, added to base_TD if there is one."""
    out_TD = rows_RD.new_zeros(num_tokens, rows_RD.shape[1]) if base_TD is None else base_TD.clone()
    _add_in_row_order(out_TD, token_R, rows_RD)
    return out_TD


@torch.library.custom_op("spurline::scatter_add_rows_", mutates_args={"base_TD"})
def scatter_add_rows_(base_TD: Tensor, token_R: Tensor, rows_RD: Tensor) -> None:
    """Add each token's rows to base_TD (T, D) in place; forward only."""
    _add_in_row_order(base_TD, token_R, rows_RD)


def _add_in_row_order(out_TD: Tensor, token_R: Tensor, rows_RD: Tensor) -> None:
    if out_TD.device.type in ("cpu", "mps"):
        out_TD.index_add_(0, token_R, rows_RD)
    else:
        # index_add_ adds in order under use_deterministic_algorithms only, where it is this kernel, which sorts rows by
        # token, behind a copy of the rows and a check of token_R for which the host waits on XPUs. Here: accumulate,
        # and no check.
        torch.ops.aten._index_put_impl_(out_TD, [token_R], rows_RD, True, True)


@torch.library.custom_op("spurline::permute_rows", mutates_args=())
def permute_rows(rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """(R, D) -> (R, D): row r of the result is row index_R[r]; the gradient is permuted by inverse_R."""
    return rows_RD.index_select(0, index_R)


@torch.library.custom_op("spurline::pad_rows", mutates_args=())
def pad_rows(rows_RD: Tensor, place_R: Tensor, num_places: int) -> Tensor:
    """(R, D) -> (A, D): each row in its own place, zeros in empty places."""
    return rows_RD.new_zeros(num_places, rows_RD.shape[1]).index_copy_(0, place_R, rows_RD)


@torch.library.custom_op("spurline::unpad_rows", mutates_args=())
def unpad_rows(rows_AD: Tensor, place_R: Tensor) -> Tensor:
    """(A, D) -> (R, D): the row in each place of place_R, which are distinct."""
    return rows_AD.index_select(0, place_R)


@gather_rows.register_fake
def _(x_TD: Tensor, token_R: Tensor) -> Tensor:
    return x_TD.new_empty(token_R.shape[0], x_TD.shape[1])


@scatter_add_rows.register_fake
def _(rows_RD: Tensor, token_R: Tensor, num_tokens: int, base_TD: Tensor | None = None) -> Tensor:
    return rows_RD.new_empty(num_tokens, rows_RD.shape[1])


@scatter_add_rows_.register_fake
def _(base_TD: Tensor, token_R: Tensor, rows_RD: Tensor) -> None:
    return None


@permute_rows.register_fake
def _(rows_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    return rows_RD.new_empty(index_R.shape[0], rows_RD.shape[1])


@pad_rows.register_fake
def _(rows_RD: Tensor, place_R: Tensor, num_places: int) -> Tensor:
    return rows_RD.new_empty(num_places, rows_RD.shape[1])


@unpad_rows.register_fake
def _(rows_AD: Tensor, place_R: Tensor) -> Tensor:
    return rows_AD.new_empty(place_R.shape[0], rows_AD.shape[1])


def _save_for_padding(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    # Not a saved tensor, for the same reason as in `_save_for_gather`.
    ctx.place_R, ctx.num_places = inputs[1], inputs[0].shape[0]


def _pad_backward(ctx, grad_AD):  # type: ignore[no-untyped-def]
    return unpad_rows(grad_AD, ctx.place_R), None, None


def _unpad_backward(ctx, grad_RD):  # type: ignore[no-untyped-def]
    return pad_rows(grad_RD, ctx.place_R, ctx.num_places), None


def _save_for_permute(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[1:])


def _permute_backward(ctx, grad_RD):  # type: ignore[no-untyped-def]
    index_R, inverse_R = ctx.saved_tensors
    return permute_rows(grad_RD, inverse_R, index_R), None, None


def _save_for_gather(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    # Not a saved tensor: recomputation stops at the last of those, before rows are sent back to be combined.
    x_TD, ctx.token_R = inputs
    ctx.num_tokens = x_TD.shape[0]


def _gather_backward(ctx, grad_RD):  # type: ignore[no-untyped-def]
    return scatter_add_rows(grad_RD, ctx.token_R, ctx.num_tokens), None


def _save_for_scatter(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, ctx.token_R, _, base_TD = inputs
    ctx.has_base = base_TD is not None


def _scatter_backward(ctx, grad_TD):  # type: ignore[no-untyped-def]
    return gather_rows(grad_TD, ctx.token_R), None, None, grad_TD if ctx.has_base else None


gather_rows.register_autograd(_gather_backward, setup_context=_save_for_gather)
permute_rows.register_autograd(_permute_backward, setup_context=_save_for_permute)
scatter_add_rows.register_autograd(_scatter_backward, setup_context=_save_for_scatter)
pad_rows.register_autograd(_pad_backward, setup_context=_save_for_padding)
unpad_rows.register_autograd(_unpad_backward, setup_context=_save_for_padding)
