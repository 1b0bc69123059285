"""Compare an MoE layer with the reference: its output and all gradients."""

import torch
from torch import Tensor

from spurline.moe.layer import MoE
from spurline.moe.reference import reference_balance_loss, reference_moe


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the norm of `expected`; 0 if both are empty or both are zero."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    difference = (actual.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp_min(1e-30)).item() if difference else 0.0


def layer_results(moe: MoE, x: Tensor) -> dict[str, Tensor]:
    """The layer's output `y` and the gradients of `x` and of every parameter, by name."""
    x = x.detach().requires_grad_()
    y = moe(x)
    gradients = torch.autograd.grad((y * _direction(x)).sum(), [x, *moe.parameters()])
    return _by_name(moe, y, gradients)


def reference_results(moe: MoE, x: Tensor, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The same from the reference with the layer's weights, in `dtype` (default: the dtype of x)."""
    dtype = dtype or x.dtype
    direction = _direction(x).to(dtype)
    x = x.detach().to(dtype).requires_grad_()
    weights = {name: p.detach().to(dtype).requires_grad_() for name, p in moe.named_parameters()}
    tensors = weights | dict(moe.named_buffers())
    y = reference_moe(x.reshape(-1, x.shape[-1]), tensors, moe.config).view(x.shape)
    loss = (y * direction).sum()
    if moe.training and x.numel():
        x_BLD = x.reshape(x.shape[:-2].numel(), -1, x.shape[-1])
        loss = loss + reference_balance_loss(x_BLD, tensors, moe.config)
    inputs = [x, *weights.values()]
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    return _by_name(moe, y, [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, gradients, strict=True)])


def errors_between(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    return {name: relative_error(actual[name], expected[name]) for name in expected}


def _direction(x: Tensor) -> Tensor:
    """A fixed random tensor; the loss is its inner product with the output."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())).to(x.dtype)


def _by_name(moe: MoE, y: Tensor, gradients: list[Tensor] | tuple[Tensor, ...]) -> dict[str, Tensor]:
    names = ["x", *(name for name, _ in moe.named_parameters())]
    return {"y": y.detach()} | dict(zip(names, gradients, strict=True))
