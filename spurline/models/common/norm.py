"""RMSNorm, computed in at least float32."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spurline.parallel.local import local


class RMSNorm(nn.Module):
    """Scale each row to a root mean square of one, then by a learned weight: (..., dim) -> (..., dim)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(dtype), (self.dim,), local(self.weight).to(dtype), self.eps).to(x.dtype)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        tensor.fill_(1)
