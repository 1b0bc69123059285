"""Layers of the vision encoder that the text model does not have: biases, LayerNorm, position embeddings."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spurline.comm.gradients import local
from spurline.models.common.init import INIT_STD
from spurline.models.common.linear import Linear
from spurline.ops.draw import drawn_in_blocks, fill_truncated_normal


class BiasedLinear(Linear):
    """Matrix product with a bias: (..., in_dim) -> (..., out_dim)."""

    def __init__(self, in_dim: int, out_dim: int, std: float = INIT_STD) -> None:
        super().__init__(in_dim, out_dim, std)
        self.bias = nn.Parameter(torch.zeros(out_dim))

    def forward(self, x: Tensor) -> Tensor:
        if self.scale_of or self.precision is not None:
            return super().forward(x)
        return F.linear(x, local(self.weight).to(x.dtype), local(self.bias).to(x.dtype))

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        if name == "bias":
            tensor.zero_()
        else:
            super().init_parameter(name, tensor, generator)


class LayerNorm(nn.Module):
    """LayerNorm: each row to zero mean and unit variance, then a learned scale and shift."""

    keeps_float32: ClassVar = True  # FSDP2 all-gathers its parameters in float32, whatever the dtype of others

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim), computed in at least float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight, bias = local(self.weight).to(dtype), local(self.bias).to(dtype)
        return F.layer_norm(x.to(dtype), (self.dim,), weight, bias, self.eps).to(x.dtype)

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        tensor.fill_(1.0 if name == "weight" else 0.0)


class PositionTable(nn.Module):
    """Learned position embeddings on a grid of side x side points, interpolated: (N, 4) and (N, 4) -> (N, dim)."""

    def __init__(self, side: int, dim: int) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.empty(side * side, dim))

    def forward(self, point_N4: Tensor, share_N4: Tensor) -> Tensor:
        """Bilinear interpolation: the weighted sum of four points of the grid."""
        return (F.embedding(point_N4, local(self.weight)) * share_N4.unsqueeze(-1)).sum(1)

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        fill_truncated_normal(tensor, INIT_STD, generator)
