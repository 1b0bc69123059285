"""Small functions of tensors: SwiGLU, top-k with a fixed tie-break, statistics that count each micro-batch once."""

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of any shape."""
    return F.silu(gate) * up


@torch.library.custom_op("spurline::stable_topk", mutates_args=())
def stable_topk(score_TE: Tensor, k: int) -> Tensor:
    """(T, E) -> (T, k): the ids of the k highest scores, highest first; of equal scores the lower id (unlike topk)."""
    if score_TE.device.type == "cpu":
        # Where no two of the best k + 1 scores are equal, `topk` has one answer, in half the time of a sort or less.
        best = score_TE.topk(min(k + 1, score_TE.shape[1]), dim=-1)
        if (best.values[:, :-1] > best.values[:, 1:]).all():
            return best.indices[:, :k].contiguous()
    return torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


@stable_topk.register_fake
def _(score_TE: Tensor, k: int) -> Tensor:
    return score_TE.new_empty(score_TE.shape[0], k, dtype=torch.int64)


_ran_without_grad: set[int] = set()
"""The owners (by address) whose last forward outside of a backward pass ran with gradients off."""


@torch.library.custom_op("spurline::accumulate_once", mutates_args={"total"})
def accumulate_once(total: Tensor, value: Tensor, owner: Tensor, grad_enabled: bool) -> None:
    """Add value to total once for each micro-batch that is trained, however its forward is recomputed.

    A forward with gradients counts, unless a backward pass repeats one that has been counted (activation checkpointing,
    use_reentrant=False). With use_reentrant=True the first forward has gradients off, and the one inside the backward
    pass counts. Only inside a backward pass is there a graph task. `owner` is a tensor of the module that counts, at
    the same address in both forwards: it is not read. (Traced, `total` itself may be a copy.)
    """
    address = owner.data_ptr()
    if torch._C._current_graph_task_id() == -1:
        (_ran_without_grad.discard if grad_enabled else _ran_without_grad.add)(address)
        counts = grad_enabled
    else:
        counts = grad_enabled and address in _ran_without_grad
    if counts:
        total.add_(value)


@accumulate_once.register_fake
def _(total: Tensor, value: Tensor, owner: Tensor, grad_enabled: bool) -> None:
    return None
