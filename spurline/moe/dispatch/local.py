"""Dispatch on one device: rows are sorted by expert, and summed back by token.

T tokens, K experts per token, R = T*K rows, D width, E experts.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.plan import register_dispatcher
from spurline.moe.dispatch.rows import gather_weights, host_counts, sum_rows
from spurline.moe.ops.rows import gather_rows
from spurline.moe.router import Routing
from spurline.moe.telemetry import count


@dataclass(frozen=True)
class LocalPlan:
    token_R: Tensor
    weight_R: Tensor
    rows_per_expert: Tensor | list[int]
    num_tokens: int
    score_before_experts: bool

    def dispatch(self, x_TD: Tensor) -> Tensor:
        rows_RD = gather_rows(x_TD, self.token_R)
        return self._weigh(rows_RD) if self.score_before_experts else rows_RD

    def combine(self, rows_RD: Tensor, onto_TD: Tensor | None = None, keep: Iterable[Tensor] = ()) -> Tensor:
        if not self.score_before_experts:
            rows_RD = self._weigh(rows_RD)
        return sum_rows(rows_RD, self.token_R, self.num_tokens, onto_TD, keep)

    def _weigh(self, rows_RD: Tensor) -> Tensor:
        count("weigh.before_experts" if self.score_before_experts else "weigh.after_experts")
        return rows_RD * self.weight_R.to(rows_RD.dtype).unsqueeze(-1)


class LocalDispatcher:
    def __init__(self, config: MoEConfig) -> None:
        self.score_before_experts = config.score_before_experts

    def plan(self, routing: Routing) -> LocalPlan:
        T, K = routing.expert_TK.shape
        slot_R = torch.argsort(routing.expert_TK.flatten(), stable=True)
        return LocalPlan(
            token_R=slot_R // K,
            weight_R=gather_weights(routing.weight_TK, slot_R),
            rows_per_expert=host_counts(routing),
            num_tokens=T,
            score_before_experts=self.score_before_experts,
        )


register_dispatcher("local", LocalDispatcher)
