"""Linear layer and embedding: parameters stay in float32, and products have the dtype of the activations."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from spurline.comm.gradients import local
from spurline.models.common.init import INIT_STD, fill_truncated_normal
from spurline.ops.skinny_matmul import linear
from spurline.parallel.tensor import TensorParallel


class Linear(nn.Linear):
    """Matrix product without a bias: (..., in_dim) -> (..., out_dim)."""

    def __init__(self, in_dim: int, out_dim: int, std: float = INIT_STD) -> None:
        self.std = std  # before nn.Linear's constructor, which already fills the weight
        super().__init__(in_dim, out_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, local(self.weight).to(x.dtype))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        fill_truncated_normal(tensor, self.std, generator)

    def reset_parameters(self) -> None:
        self.init_parameter("weight", self.weight, None)


class Embedding(nn.Embedding):
    """Token embedding: (B, L) -> (B, L, dim), or this rank's positions under tensor parallelism."""

    tensor_parallel_dims: ClassVar = {"weight": 0}

    def __init__(self, num_rows: int, dim: int, std: float = INIT_STD) -> None:
        self.std = std  # before nn.Embedding's constructor, which already fills the weight
        super().__init__(num_rows, dim)
        self.tp = TensorParallel()

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return self.tp.reduce_scatter_sequence(self.tp.embed(tokens_BL, local(self.weight)))

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Logits of a model with tied embeddings, the product with every row: (B, L, dim) -> (B, L, rows)."""
        return linear(x_BLD, local(self.weight).to(x_BLD.dtype))

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        fill_truncated_normal(tensor, self.std, generator)

    def reset_parameters(self) -> None:
        self.init_parameter("weight", self.weight, None)
