"""Routing: which experts each token visits. T tokens, K experts per token, E experts."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Where every token goes: computed once by the router, used by dispatch, experts and statistics."""

    expert_TK: Tensor
    weight_TK: Tensor
    count_E: Tensor
    host_count_E: list[int] | None = None
    """count_E as host integers, if they are known without reading from the device."""
