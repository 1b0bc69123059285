"""Dispatch on one device: rows are sorted by expert, and summed back by token."""

import torch

from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.all_to_all import AllToAllDispatcher
from spurline.moe.dispatch.plan import ExpertRanks, Plan
from spurline.moe.dispatch.rows import gather_weights, host_counts
from spurline.moe.router import Routing


class LocalDispatcher:
    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        T, K = routing.expert_TK.shape
        slot_S = torch.argsort(routing.expert_TK.flatten(), stable=True)
        return Plan(
            token_S=slot_S // K,
            weight_S=gather_weights(routing.weight_TK, slot_S),
            num_tokens=T,
            score_before_experts=self.config.score_before_experts,
            rows_per_expert=host_counts(routing),
        )

    def across(self, ranks: ExpertRanks) -> AllToAllDispatcher:
        return AllToAllDispatcher(
            self.config,
            ranks.group,
            ranks.layer,
            parts_per_expert=ranks.parts_per_expert,
            same_num_tokens=ranks.same_num_tokens,
        )
