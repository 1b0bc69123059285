"""What adapters are compared with: a model without any, whose weights are W + alpha / rank * B A."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from spurline.lora.adapters import A, B, is_adapter
from spurline.models.common.init import initialize


def randomize(model: nn.Module, std: float = 0.1) -> None:
    """Give every adapter weights that are not zero, B too, whatever the layout: they depend on names alone."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def dense_results(
    config: Any, tensors: dict[str, Tensor], scale: float, tokens_BL: Tensor, labels_BL: Tensor, loss_sum: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the plain model with the adapters added to its weights, and its gradients for the adapters."""
    plain = config.build()
    initialize(plain, 0)
    leaves = {n: t.detach().clone().requires_grad_(is_adapter(n)) for n, t in tensors.items()}
    weights = {n: t for n, t in leaves.items() if not is_adapter(n)}
    for name in weights:
        if name + A in leaves:
            weights[name] = weights[name] + scale * (leaves[name + B] @ leaves[name + A])
    inputs = {"labels_BL": labels_BL, "loss_sum": loss_sum}
    loss = functional_call(plain, weights, (tokens_BL,), inputs)
    adapters = [n for n in leaves if is_adapter(n)]
    gradients = torch.autograd.grad(loss, [leaves[n] for n in adapters])
    return loss.detach(), dict(zip(adapters, gradients, strict=True))
