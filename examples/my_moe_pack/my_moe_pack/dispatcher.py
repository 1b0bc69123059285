"""A dispatcher that gives experts a capacity, on one rank and across many.

T tokens, K experts per token, E experts, S = T*K rows.
"""

from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from spurline.moe import MoEConfig, Routing
from spurline.moe.dispatch.local import LocalDispatcher
from spurline.moe.dispatch.plan import Dispatcher, ExpertRanks, Plan


class CapacityDispatcher:
    """Each expert takes up to `percent` of an even share of this rank's rows; rows beyond that get weight zero."""

    def __init__(self, config: MoEConfig, percent: int, inner: Dispatcher | None = None) -> None:
        self.config = config
        self.percent = percent
        self.inner = inner or LocalDispatcher(config)

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        capacity = -(-routing.expert_TK.numel() * self.percent // (100 * self.config.num_experts))
        fits_TK = place_in_queue(routing.expert_TK, self.config.num_experts) < capacity
        return self.inner.plan(replace(routing, weight_TK=routing.weight_TK * fits_TK), num_tokens_P)

    def across(self, ranks: ExpertRanks) -> "CapacityDispatcher":
        """The dispatcher to use instead when experts are sharded over ranks."""
        return CapacityDispatcher(self.config, self.percent, LocalDispatcher(self.config).across(ranks))


def place_in_queue(expert_TK: Tensor, num_experts: int) -> Tensor:
    """(T, K) -> (T, K): how many rows of earlier tokens go to the same expert."""
    expert_S1 = expert_TK.reshape(-1, 1)
    queue_SE = F.one_hot(expert_S1.squeeze(1), num_experts).cumsum(0)
    return (queue_SE.gather(1, expert_S1) - 1).view_as(expert_TK)


tight, roomy = (partial(CapacityDispatcher, percent=percent) for percent in (125, 800))
