"""Add to a running statistic once for each micro-batch, whatever recomputation does."""

import torch
from torch import Tensor


@torch.library.custom_op("spurline::accumulate_once", mutates_args={"total"})
def accumulate_once(total: Tensor, value: Tensor) -> None:
    """Add value to total, except while a backward pass recomputes a forward that was recorded already."""
    # Activation checkpointing runs the forward again from inside the backward; only there is a graph task under way.
    if torch._C._current_graph_task_id() == -1:
        total.add_(value)


@accumulate_once.register_fake
def _(total: Tensor, value: Tensor) -> None:
    return None
