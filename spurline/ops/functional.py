"""Small functions of tensors: SwiGLU, top-k with a fixed tie-break, statistics that count each micro-batch once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        hidden = F.silu(gate) * up
        return hidden if weight is None else hidden * weight.to(hidden.dtype).unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        active, dweight = F.silu(gate), None
        if weight is not None:
            dweight = (grad * (active * up)).sum(-1, dtype=weight.dtype)
            grad = grad * weight.to(grad.dtype).unsqueeze(-1)
        return _silu_backward(grad * up, gate), grad * active, dweight


def _silu_backward(grad: Tensor, gate: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph: the op has no second derivative
        sigmoid = torch.sigmoid(gate)
        return grad * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.ops.aten.silu_backward(grad, gate)


swiglu = _SwiGLU.apply
"""swiglu(gate, up, weight=None): silu(gate) * up, of any shape (.., F); with weights (..), each row is scaled.

Only the arguments are saved for the backward pass: recomputing the activation costs no more than reading it.
"""


@torch.library.custom_op("spurline::stable_topk", mutates_args=())
def stable_topk(score_TE: Tensor, k: int) -> Tensor:
    """(T, E) -> (T, k): the ids of the k highest scores, highest first; ties by lower id (unlike topk)."""
    if score_TE.device.type == "cpu":
        # If the best k + 1 scores are distinct, `topk` has only one answer, in half the time of a sort or less.
        best = score_TE.topk(min(k + 1, score_TE.shape[1]), dim=-1)
        if (best.values[:, :-1] > best.values[:, 1:]).all():
            return best.indices[:, :k].contiguous()
    return torch.sort(score_TE, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()


@stable_topk.register_fake
def _(score_TE: Tensor, k: int) -> Tensor:
    return score_TE.new_empty(score_TE.shape[0], k, dtype=torch.int64)


_ran_without_grad: set[int] = set()
"""The owners (by address) whose last forward outside a backward pass ran with gradients off."""


@torch.library.custom_op("spurline::accumulate_once", mutates_args={"total"})
def accumulate_once(total: Tensor, value: Tensor, owner: Tensor, grad_enabled: bool) -> None:
    """Add value to total once per training micro-batch, even if its forward is recomputed.

    A forward with gradients counts, unless it runs in a backward pass and repeats one that has been counted (activation
    checkpointing, use_reentrant=False). With use_reentrant=True the first forward has gradients off, and the one inside
    the backward pass counts. A graph task exists only inside a backward pass. `owner` is a tensor of the counting
    module, at the same address in both forwards; it is not read. (While tracing, `total` itself may be a copy.)

    A limit: a training-mode forward without gradients looks like the first one of a re-entrant checkpoint. Between a
    checkpointed forward (use_reentrant=False) and its backward pass, it makes the recomputation count again. Such a
    forward, of a teacher or for a metric, belongs in evaluation mode.
    """
    address = owner.data_ptr()
    if torch._C._current_graph_task_id() == -1:
        (_ran_without_grad.discard if grad_enabled else _ran_without_grad.add)(address)
        counts = grad_enabled
    else:
        counts = grad_enabled and address in _ran_without_grad
    if counts:
        total.add_(value)


@torch.library.custom_op("spurline::raise_to", mutates_args={"total"})
def raise_to(total: Tensor, value: Tensor) -> None:
    """Set total to the maximum of itself and value; idempotent, so recomputation changes nothing."""
    total.copy_(torch.maximum(total, value))


@raise_to.register_fake
def _(total: Tensor, value: Tensor) -> None:
    return None


@accumulate_once.register_fake
def _(total: Tensor, value: Tensor, owner: Tensor, grad_enabled: bool) -> None:
    return None
