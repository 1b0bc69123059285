"""The last step of a plan: rows are weighted and summed by token. T tokens, S rows, D width."""

import torch
from torch import Tensor

from spurline.moe.rows import Rows
from spurline.moe.telemetry import counted
from spurline.ops.rows import scatter_add_rows, scatter_add_rows_


def combine_rows(rows: Rows, rows_SD: Tensor, token_S: Tensor, num_tokens: int) -> Tensor:
    """(S, D) -> (T, D): rows are weighted, unless they already are, summed by token and added to `rows.onto_TD`.

    In place if gradients are off and nothing else holds the destination.
    """
    if rows.weight_S is not None and not rows.weigh_before:
        rows_SD = rows.weigh(rows_SD)
    onto_TD = None if rows.onto_TD is None else rows.onto_TD.to(rows_SD.dtype)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return _Sum.out_of_place(rows_SD, token_S, num_tokens, onto_TD)
    if onto_TD is None:
        return _Sum.in_place(rows_SD, token_S, rows_SD.new_zeros(num_tokens, rows_SD.shape[1]))
    is_ours = rows.may_overwrite or onto_TD is not rows.onto_TD
    if is_ours and onto_TD.is_contiguous():
        return _Sum.in_place(rows_SD, token_S, onto_TD)
    return _Sum.out_of_place(rows_SD, token_S, num_tokens, onto_TD)


class _Sum:
    @staticmethod
    @counted("scatter.out_of_place")
    def out_of_place(rows_SD: Tensor, token_S: Tensor, num_tokens: int, onto_TD: Tensor | None) -> Tensor:
        return scatter_add_rows(rows_SD, token_S, num_tokens, onto_TD)

    @staticmethod
    @counted("scatter.in_place")
    def in_place(rows_SD: Tensor, token_S: Tensor, onto_TD: Tensor) -> Tensor:
        scatter_add_rows_(onto_TD, token_S, rows_SD)
        return onto_TD
