"""What every dispatcher does with rows: weigh them, count them, and sum them back onto tokens.

T tokens, K experts per token, R rows, D width.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from spurline.moe.router import Routing
from spurline.moe.telemetry import count
from spurline.ops.rows import scatter_add_rows, scatter_add_rows_


def gather_weights(weight_TK: Tensor, slot_R: Tensor) -> Tensor:
    """(T, K) -> (R,): the weight of each row. No slot comes twice, so gradients need no order to be summed in."""
    return weight_TK.flatten().index_select(0, slot_R)


def host_counts(routing: Routing) -> Tensor | list[int]:
    """Row counts as host integers if that costs no wait for a device, else as the tensor they are."""
    if routing.host_count_E is not None:
        return routing.host_count_E
    if routing.count_E.device.type == "cpu" and not torch.compiler.is_compiling():
        return routing.count_E.tolist()
    return routing.count_E


def sum_rows(
    rows_RD: Tensor, token_R: Tensor, num_tokens: int, onto_TD: Tensor | None = None, keep: Iterable[Tensor] = ()
) -> Tensor:
    """(R, D) -> (T, D): rows summed by token onto onto_TD, in place where nothing that must survive can be hurt.

    In place needs gradients off and a destination that shares no storage with any tensor in `keep`.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        count("scatter.out_of_place")
        return scatter_add_rows(rows_RD, token_R, num_tokens, onto_TD)
    if onto_TD is None:
        onto_TD = rows_RD.new_zeros(num_tokens, rows_RD.shape[1])
    elif not onto_TD.is_contiguous() or any(shares_storage(onto_TD, kept) for kept in keep):
        count("scatter.out_of_place")
        return scatter_add_rows(rows_RD, token_R, num_tokens, onto_TD)
    count("scatter.in_place")
    scatter_add_rows_(onto_TD, token_R, rows_RD)
    return onto_TD


def shares_storage(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
