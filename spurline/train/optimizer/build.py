"""AdamW with decay on matrices only."""

import torch
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from spurline.config import Optimizer


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW over the trainable parameters in the model's order: first the group that decays, then the one that doesn't.

    Whatever has two dims or more decays (embeddings, gates and stacked experts too); norms and biases don't.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Left to itself, torch updates CPU parameters one small operation at a time, many times slower.
    fused_devices = _get_fused_kernels_supported_devices()
    fused = all(p.device.type in fused_devices for p in parameters)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
