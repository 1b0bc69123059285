"""Routing: which experts each token visits, as a value. T tokens, K experts per token, E experts."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Where every token goes: made once by the router, used by dispatch, experts and statistics alike."""

    expert_TK: Tensor
    weight_TK: Tensor
    count_E: Tensor
    host_count_E: list[int] | None = None
    """count_E as host integers, where they are known without asking the device."""
