"""RMSNorm, computed in at least float32."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from spurline.comm.gradients import local


class RMSNorm(nn.Module):
    """Scale each row to a root mean square of one, then by a learned weight: (..., dim) -> (..., dim)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(dtype), local(self.weight).to(dtype), self.eps).to(x.dtype)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        tensor.fill_(1)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """(..., D) -> (..., D)."""
    if torch.compiler.is_compiling():  # inductor fuses it into one kernel
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return _RMSNorm.apply(x, weight_D, eps)


class _RMSNorm(Function):
    """Few passes over few temporaries: as separate autograd ops it takes nearly three times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, scale)
        return (x * scale).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, scale = ctx.saved_tensors
        normed = x * scale
        products = grad * normed
        dweight_D = products.flatten(0, -2).sum(0)
        # The component of the gradient along the row is removed: scaling a row does not change its norm's output.
        along = products.mul_(weight_D).mean(-1, keepdim=True)
        return torch.mul(grad, weight_D, out=products).addcmul_(normed, along, value=-1).mul_(scale), dweight_D, None
