"""Parameters and FLOPs of the parts of a model, for balancing pipeline stages. No torch import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Parameters and training FLOPs of a part of a model."""

    params: int
    active_params: int
    """Those used for one token."""
    flops_per_token: int
    """Forward and backward."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.params + other.params,
            self.active_params + other.active_params,
            self.flops_per_token + other.flops_per_token,
        )

    def __mul__(self, times: int) -> Cost:
        return Cost(times * self.params, times * self.active_params, times * self.flops_per_token)


@dataclass(frozen=True)
class ModelCosts:
    """The cost of each part of a model, in forward order. Parameters that two parts share are counted once."""

    embed: Cost
    """Everything that the first pipeline stage holds besides layers."""
    layers: tuple[Cost, ...]
    head: Cost
    """Everything that the last pipeline stage holds besides layers."""

    def total(self) -> Cost:
        return sum(self.layers, self.embed + self.head)


def dense_cost(params: int) -> Cost:
    """The cost of matrices that every token is multiplied by: six FLOPs per weight."""
    return Cost(params, params, 6 * params)
