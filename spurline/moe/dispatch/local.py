"""Dispatch on one device: rows are sorted by expert, and summed back by token."""

import torch

from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.plan import Plan, register_dispatcher
from spurline.moe.dispatch.rows import gather_weights, host_counts
from spurline.moe.router import Routing


class LocalDispatcher:
    def __init__(self, config: MoEConfig) -> None:
        self.score_before_experts = config.score_before_experts

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        T, K = routing.expert_TK.shape
        slot_S = torch.argsort(routing.expert_TK.flatten(), stable=True)
        return Plan(
            token_S=slot_S // K,
            weight_S=gather_weights(routing.weight_TK, slot_S),
            num_tokens=T,
            score_before_experts=self.score_before_experts,
            rows_per_expert=host_counts(routing),
        )


register_dispatcher("local", LocalDispatcher)
