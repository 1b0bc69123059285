"""The dense feed-forward layer of a block."""

from typing import ClassVar

from torch import Tensor, nn

from spurline.models.common.init import INIT_STD
from spurline.models.common.linear import Linear
from spurline.ops.functional import swiglu


class FeedForward(nn.Module):
    """SwiGLU feed-forward, w2(silu(w1 x) * w3 x): (..., dim) -> (..., dim)."""

    tensor_parallel_dims: ClassVar = {"w1.weight": 0, "w3.weight": 0, "w2.weight": 1}

    def __init__(self, dim: int, hidden_dim: int, output_std: float = INIT_STD) -> None:
        super().__init__()
        self.w1 = Linear(dim, hidden_dim)
        self.w3 = Linear(dim, hidden_dim)
        self.w2 = Linear(hidden_dim, dim, std=output_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x)))
