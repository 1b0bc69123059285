"""Which experts the tokens of a text visit: a forward pass over data, with hooks on the routers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from spurline.data.batch import Batch
from spurline.moe.balance import routers
from spurline.moe.routing import Routing

Collected = tuple[
    np.ndarray[Any, Any], dict[str, np.ndarray[Any, Any]], dict[str, np.ndarray[Any, Any]], dict[str, int]
]
"""Tokens (N, L); and for each layer expert ids (N * L, K), their weights, and the number of experts."""


@torch.no_grad()
def collect_visits(model: nn.Module, batches: Any, num_sequences: int, batch_size: int) -> Collected:
    """Run the model on the first sequences of a data set; returns each token with the experts it visited."""
    device = next(model.parameters()).device
    seen: dict[str, list[Routing]] = {}
    hooks = [
        router.register_forward_hook(partial(_keep, seen, layer))
        for layer, router in routers(model).items()
        if not layer.startswith("mtp.")  # which are used in training only
    ]
    tokens = []
    try:
        for first in range(0, num_sequences, batch_size):
            batch: Batch = batches.batch(first, min(batch_size, num_sequences - first)).to(device)
            tokens.append(batch.tokens_BL.cpu().numpy())
            model(batch.tokens_BL, **batch.extras)
    finally:
        for hook in hooks:
            hook.remove()
    return (
        np.concatenate(tokens),
        {layer: np.concatenate([r.expert_TK.cpu().numpy() for r in all_of]) for layer, all_of in seen.items()},
        {layer: np.concatenate([r.weight_TK.float().cpu().numpy() for r in all_of]) for layer, all_of in seen.items()},
        {layer: router.config.num_experts for layer, router in routers(model).items() if layer in seen},
    )


def _keep(seen: dict[str, list[Routing]], layer: str, router: nn.Module, args: Any, routing: Routing) -> None:
    seen.setdefault(layer, []).append(routing)
