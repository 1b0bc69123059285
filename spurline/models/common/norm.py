"""RMSNorm, computed in at least float32."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from spurline.comm.collectives import all_reduce_sum, copy_to_group
from spurline.comm.gradients import local
from spurline.ops.draw import drawn_in_blocks
from spurline.parallel.tensor import TensorParallel


class RMSNorm(nn.Module):
    """Scale each row to a root mean square of one, then by a learned weight: (..., dim) -> (..., dim)."""

    keeps_float32: ClassVar = True  # FSDP2 all-gathers its weight in float32, whatever the dtype of other weights

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return rms_norm(x.to(dtype), local(self.weight).to(dtype), self.eps).to(x.dtype)

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        tensor.fill_(1)


class AllHeadsNorm(RMSNorm):
    """RMSNorm over the channels of all heads, of which a rank holds some under tensor parallelism."""

    tensor_parallel_dims: ClassVar = {"weight": 0}

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__(dim, eps)
        self.tp = TensorParallel()

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.group is None:
            return super().forward(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        lifted = x.to(dtype)
        # Every rank uses the sum for its own channels, so its gradient is summed too.
        square = copy_to_group(all_reduce_sum(lifted.square().sum(-1, keepdim=True), self.tp.group), self.tp.group)
        scale = (square / self.dim + self.eps).rsqrt()
        return (lifted * scale * local(self.weight).to(dtype)).to(x.dtype)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Functional RMSNorm: (..., D) -> (..., D)."""
    if torch.compiler.is_compiling():  # inductor fuses it into one kernel
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return _RMSNorm.apply(x, weight_D, eps)


class _RMSNorm(Function):
    """RMSNorm in few passes with few temporaries: as separate autograd ops it takes nearly three times as long."""

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
