"""Linear layer, output matrix and embedding: matmuls are in the dtype of the activations.

A weight that FSDP2 has all-gathered in that dtype is used as it is; any other is cast on each use.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spurline.comm.gradients import local
from spurline.lora.adapters import Adaptable, product
from spurline.models.common.init import INIT_STD
from spurline.ops.draw import drawn_in_blocks, fill_truncated_normal
from spurline.ops.low_precision import LowPrecision, linear
from spurline.parallel.tensor import TensorParallel


class Linear(nn.Linear, Adaptable):
    """Matrix product, with a bias if asked for: (..., in_dim) -> (..., out_dim)."""

    precision: LowPrecision | None = None
    """Low-precision recipe of the matmul (None: the dtype of the activations)."""

    def __init__(self, in_dim: int, out_dim: int, std: float = INIT_STD, bias: bool = False) -> None:
        self.std = std  # before nn.Linear's constructor, which initializes the weight
        super().__init__(in_dim, out_dim, bias=bias)

    def adaptable_weights(self) -> tuple[str, ...]:
        return ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        y = product(x, self.weight_of("weight"), self.precision)
        return y if self.bias is None else y + local(self.bias).to(x.dtype)

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        if name == "bias":
            nn.init.zeros_(tensor)
        else:
            fill_truncated_normal(tensor, self.std, generator)

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            self.init_parameter(name, parameter, None)


class SummedLinear(Linear):
    """Row-parallel linear layer: outputs are summed over tensor-parallel ranks, each of which adds 1/n of the bias."""

    def __init__(self, in_dim: int, out_dim: int, std: float = INIT_STD, bias: bool = False) -> None:
        super().__init__(in_dim, out_dim, std, bias)
        self.tp = TensorParallel()

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None or self.tp.group is None:
            return super().forward(x)
        share = local(self.bias).to(x.dtype) / self.tp.group.size()
        return product(x, self.weight_of("weight"), self.precision) + share


class OutputMatrix(Linear):
    """The output matrix of a language model (`lm_head` elsewhere): (B, L, D) -> (B, L, V)."""

    def forward(self, x: Any, losses: Callable[[Any, Callable[[Tensor], Tensor]], Any] | None = None) -> Any:
        """Logits; or losses(x, product), for losses that need several products with the matrix.

        FSDP2 all-gathers the matrix and reduces its gradient once per call, so a chunked loss should be one call.
        """
        product = super().forward
        return product(x) if losses is None else losses(x, product)


class Embedding(nn.Embedding):
    """Token embedding: (B, L) -> (B, L, dim), or only this rank's positions under tensor parallelism."""

    tensor_parallel_dims: ClassVar = {"weight": 0}

    def __init__(self, num_rows: int, dim: int, std: float = INIT_STD) -> None:
        self.std = std  # before nn.Embedding's constructor, which initializes the weight
        super().__init__(num_rows, dim)
        self.tp = TensorParallel()

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tp.embed(tokens_BL, local(self.weight))
        # Cloned so that autograd does not see a view: FSDP2 warns about modules that return one.
        return x_BLD if self.tp.group is None else self.tp.reduce_scatter_sequence(x_BLD).clone()

    def logits(self, x_BLD: Tensor) -> Tensor:
        """Logits of a model with tied embeddings, products with every row: (B, L, dim) -> (B, L, rows)."""
        return linear(x_BLD, local(self.weight).to(x_BLD.dtype))

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        fill_truncated_normal(tensor, self.std, generator)

    def reset_parameters(self) -> None:
        self.init_parameter("weight", self.weight, None)
