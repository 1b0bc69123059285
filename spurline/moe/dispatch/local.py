"""Dispatch on one device: an index sorts rows by expert, and kernels gather them from their tokens.

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
    """The token of each row, sorted by expert."""
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
        counts = RowCounts(routing.count_E, host_E)
        return plan_rows(self.config, slot_S, routing.weight_TK.flatten(), counts, T, K)

    def across(self, ranks: ExpertRanks) -> AllToAllDispatcher:
        return AllToAllDispatcher(
            self.config,
            ranks.group,
            ranks.layer,
            parts_per_expert=ranks.parts_per_expert,
            same_num_tokens=ranks.same_num_tokens,
        )


def plan_rows(
    config: MoEConfig, slot_S: Tensor, weight_TK: Tensor, counts: RowCounts, num_tokens: int, top_k: int
) -> LocalPlan | SentinelPlan:
    """The plan for rows `slot_S`, slots of (T, K) sorted by expert, with the weight of every slot, (T*K,).

    With a row multiple, empty places have slot number T*K, and so the sentinel as their token. If only the device knows
    the counts, they are not read: there are as many places as any routing may need.
    """
    weigh_before, multiple = config.score_before_experts, config.row_multiple
    if multiple == 1:
        return LocalPlan(slot_S // top_k, weight_TK.index_select(0, slot_S), num_tokens, weigh_before, counts)
    num_rows, num_slots = slot_S.shape[0], weight_TK.shape[0]
    enough = most_places(num_rows, counts.count_e.shape[0], multiple) if counts.host_count_e is None else None
    places, num_places = align_counts(counts, multiple, enough)
    slot_A = fill_places(places_of(counts.count_e, places.count_e, num_rows), slot_S, num_places, num_slots)
    weight_A = with_zero(weight_TK).index_select(0, slot_A)
    plan = LocalPlan(slot_A // top_k, weight_A, num_tokens + 1, weigh_before, places)
    return SentinelPlan(plan, "permute.aligned", num_places - num_rows)
