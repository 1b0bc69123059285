"""Dispatch on one device: rows stay among their tokens, sorted by expert.

T tokens, K experts per token, S = T*K rows, A >= S places for them, D width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spurline import accelerator
from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.aligned import align_counts, fill_places, most_places, places_of
from spurline.moe.dispatch.all_to_all import AllToAllDispatcher
from spurline.moe.dispatch.combine import combine_rows
from spurline.moe.dispatch.plan import ExpertRanks
from spurline.moe.dispatch.sentinel import SentinelPlan, with_zero
from spurline.moe.routing import Routing
from spurline.moe.rows import RowCounts, Rows


@dataclass(frozen=True)
class LocalPlan:
    token_S: Tensor
    """The token of each row, expert after expert."""
    weight_S: Tensor
    num_tokens: int
    weigh_before: bool
    counts: RowCounts

    def dispatch(self, x_TD: Tensor) -> Rows:
        inside = not self.weigh_before
        return Rows(x_TD, self.counts, self.token_S, self.weight_S, self.weigh_before, weigh_inside=inside)

    def combine(self, rows: Rows) -> Tensor:
        return rows.x if rows.is_combined else combine_rows(rows, rows.x, self.token_S, self.num_tokens)


class LocalDispatcher:
    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> LocalPlan | SentinelPlan:
        T, K = routing.expert_TK.shape
        slot_S = torch.argsort(routing.expert_TK.flatten(), stable=True)
        host_E = routing.host_count_E
        reads_at_once = routing.count_E.is_cpu and not accelerator.stand_in
        if host_E is None and reads_at_once and not torch.compiler.is_compiling():
            host_E = routing.count_E.tolist()
        counts, weight_S = RowCounts(routing.count_E, host_E), routing.weight_TK.flatten()
        if self.config.row_multiple > 1:
            plan = self._aligned(slot_S, with_zero(weight_S), counts, T, K)
            return SentinelPlan(plan, "permute.aligned", plan.token_S.shape[0] - slot_S.shape[0])
        weigh_before = self.config.score_before_experts
        return LocalPlan(slot_S // K, weight_S.index_select(0, slot_S), T, weigh_before, counts)

    def _aligned(self, slot_S: Tensor, weight_S: Tensor, counts: RowCounts, T: int, K: int) -> LocalPlan:
        """The plan for T + 1 tokens, with slot number S in places without a row; reads nothing from a device."""
        S, E, multiple = slot_S.shape[0], self.config.num_experts, self.config.row_multiple
        aligned, num_places = align_counts(counts, multiple, most_places(S, E, multiple))
        slot_A = fill_places(places_of(counts.count_e, aligned.count_e, S), slot_S, num_places, S)
        weight_A = weight_S.index_select(0, slot_A)
        return LocalPlan(slot_A // K, weight_A, T + 1, self.config.score_before_experts, aligned)

    def across(self, ranks: ExpertRanks) -> AllToAllDispatcher:
        return AllToAllDispatcher(
            self.config,
            ranks.group,
            ranks.layer,
            parts_per_expert=ranks.parts_per_expert,
            same_num_tokens=ranks.same_num_tokens,
        )
