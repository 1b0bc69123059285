"""Weights with low-rank adapters: the base class of modules that support them, and their matmul.

A weight is (..., O, I): O outputs, I inputs, and a leading expert dim if it is stacked. Its adapter is two matrices of
rank r, A (..., r, I) and B (..., O, r), parameters of the same module: `w1_EFD_lora_a` and `w1_EFD_lora_b` for
`w1_EFD`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spurline.comm.gradients import local
from spurline.ops.low_precision import LowPrecision, linear

A, B = "_lora_a", "_lora_b"
_NONE: dict[str, float] = {}  # no MappingProxyType: while tracing, torch 2.13 treats an empty one as true


class LowRank(NamedTuple):
    """A weight and its adapter: W + scale * B A, kept as factors."""

    weight: Tensor
    a: Tensor
    b: Tensor
    scale: float

    def sum(self) -> Tensor:
        """The merged weight, in the dtype of W."""
        return self.weight + (self.scale * (self.b @ self.a)).to(self.weight.dtype)


class Adaptable(nn.Module):
    """A module that may have adapters. A subclass names the weights, and accesses them through `weight_of`."""

    scale_of: Mapping[str, float] = _NONE
    """The weights that have adapters, and the scales of these."""

    def adaptable_weights(self) -> tuple[str, ...]:
        """Names of the parameters that may have adapters: (..., O, I) matrices."""
        return ()

    def add_adapter(self, name: str, rank: int, scale: float) -> None:
        """Add an adapter to a weight, on its device and in its dtype; `init_adapter` fills it."""
        weight = self.get_parameter(name)
        *stack, num_outputs, num_inputs = weight.shape
        self.scale_of = {**self.scale_of, name: scale}
        self.register_parameter(name + A, nn.Parameter(weight.new_empty(*stack, rank, num_inputs)))
        self.register_parameter(name + B, nn.Parameter(weight.new_empty(*stack, num_outputs, rank)))

    def init_adapter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        """Fill a block of A or B: B is zero, so that training starts from the unchanged weights."""
        if name.endswith(B):
            tensor.zero_()
        else:
            bound = self.get_parameter(name).shape[-1] ** -0.5
            tensor.uniform_(-bound, bound, generator=generator)

    def weight_of(self, name: str) -> Tensor | LowRank:
        """This rank's shard of a weight, with its shard of the adapter if there is one."""
        weight = local(getattr(self, name))
        if name not in self.scale_of:
            return weight
        a, b = local(getattr(self, name + A)), local(getattr(self, name + B))
        return LowRank(weight, a, b, self.scale_of[name])

    @torch.no_grad()
    def fold_adapters(self) -> None:
        """Merge the adapters into their weights, and remove them; for plain tensors."""
        for name in self.scale_of:
            low_rank = self.weight_of(name)
            assert isinstance(low_rank, LowRank)
            self.get_parameter(name).copy_(low_rank.sum())
            for part in (A, B):
                delattr(self, name + part)
        self.scale_of = {}


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter, by its name."""
    return name.endswith((A, B))


def product(x: Tensor, weight: Tensor | LowRank, precision: LowPrecision | None = None) -> Tensor:
    """(..., I) and (O, I) -> (..., O), in the dtype of x; `precision` applies to the weight, not to its adapter."""
    if isinstance(weight, Tensor):
        return linear(x, weight.to(x.dtype), precision)
    low = linear(x, weight.a.to(x.dtype), None) * weight.scale
    return linear(x, weight.weight.to(x.dtype), precision) + linear(low, weight.b.to(x.dtype), None)


def whole(weight: Tensor | LowRank) -> Tensor:
    """The merged weight as one tensor, for code that needs the weight itself and not a matmul with it."""
    return weight if isinstance(weight, Tensor) else weight.sum()
