"""Make a model compute its MoE layers with the reference, in plain loops.

T tokens, D width, E experts.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spurline.moe.balance import attach_loss
from spurline.moe.dispatch.local import LocalDispatcher
from spurline.moe.layer import MoE
from spurline.moe.reference import reference_balance_loss, reference_choice, reference_moe, reference_scores

# Limit on active parameters x tokens per step; beyond it the loops would take minutes.
_MAX_READS = 2_000_000_000


def use_reference(model: nn.Module, num_tokens: int) -> str:
    """Replace the forward of every MoE layer, in place, by the reference; returns a description.

    With too many tokens for its loops, or a custom router, layers use the simplest path instead: local dispatch and
    one matmul per expert.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not layers:
        return "the model on one process"
    why_not = ""
    if sum(num_tokens * moe.config.num_active_params() for moe in layers) > _MAX_READS:
        why_not = "the model is too large for the reference's loops"
    elif any(moe.config.router != "top_k" for moe in layers):
        why_not = "the reference supports only the top_k router"
    for moe in layers:
        if why_not:
            moe.dispatcher, moe.experts.backend = LocalDispatcher(moe.config), "loop"
        else:
            moe.forward = partial(_forward, moe)  # type: ignore[method-assign]
    if why_not:
        return f"the model on one process with local dispatch and loop experts ({why_not})"
    return "the model on one process with spurline.moe.reference in every MoE layer"


def _forward(moe: MoE, x_BLD: Tensor, *_: Any) -> Tensor:
    """(B, L, D) -> (B, L, D), with the same balance losses and counts as the layer's own forward."""
    tensors = dict(moe.named_parameters()) | dict(moe.named_buffers())
    x_TD = x_BLD.reshape(-1, x_BLD.shape[-1])
    # Unbind once: the backward of each `w[e]` would allocate a gradient for all experts.
    by_expert = {name: weight.unbind() for name, weight in moe.named_parameters() if name.startswith("experts.")}
    y_TD = reference_moe(x_TD, tensors | by_expert, moe.config)  # type: ignore[arg-type]

    router = moe.router
    loss = reference_balance_loss(x_BLD, tensors, moe.config) * x_TD.shape[0] * router.token_weight
    with torch.no_grad():
        score_TE = reference_scores(x_TD, tensors, moe.config)[1]
        for t, score_E in enumerate(score_TE):
            router.row_count_E[reference_choice(score_E, t, router.expert_bias_E, moe.config)] += 1
        router.balance_loss += loss
    return attach_loss(y_TD, loss).view_as(x_BLD)
