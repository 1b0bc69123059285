"""Dispatch across ranks: every expert lives on one rank of a group, and rows travel to it and back.

P ranks, E experts of which e live on each rank, T tokens on this rank, K experts per token, S = T*K rows that leave
this rank, R rows that reach it. Expert number i lives on rank i // e.

With expert tensor parallelism, the hidden width of an expert is cut into parts that live on different ranks. A part is
an expert like any other here: it gets the rows of its expert, and what the parts return adds up to the expert's output.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.comm.collectives import all_gather_counts
from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.exchange import EqualSplitExchange, UnevenExchange
from spurline.moe.dispatch.permute import SegmentPermutation, UniformPermutation
from spurline.moe.dispatch.plan import Plan, Step
from spurline.moe.dispatch.rows import gather_weights
from spurline.moe.dispatch.traffic import Traffic, forced_counts, forced_order, forced_traffic, read_on_host
from spurline.moe.router import Routing
from spurline.moe.telemetry import count


class AllToAllDispatcher:
    """Plans for one MoE layer whose experts are spread over `group`."""

    def __init__(
        self,
        config: MoEConfig,
        group: ProcessGroup,
        layer: str = "moe",
        *,
        parts_per_expert: int = 1,
        same_num_tokens: bool = True,
    ) -> None:
        """The ranks of group hold experts in order; with parts, the ranks of one expert's parts follow each other.

        same_num_tokens: whether every rank brings as many tokens, unless `plan` is told otherwise.
        """
        self.config = config
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.parts_per_expert = parts_per_expert
        self.num_experts = config.num_experts * parts_per_expert
        self.same_num_tokens = same_num_tokens
        self.label = layer if config.check_exchange else ""
        self._forced_orders: dict[tuple[int, torch.device], Tensor] = {}

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        """num_tokens_P: the tokens of each rank, where they may differ; forced balance builds on it."""
        if self.parts_per_expert > 1:
            routing = route_to_parts(routing, self.size // self.parts_per_expert, self.parts_per_expert)
        T, K = routing.expert_TK.shape
        if self._is_known_in_advance(num_tokens_P):
            count("plan.forced_balance")
            num_rows_P = [num_tokens * K for num_tokens in num_tokens_P or [T] * self.size]
            slot_S = self._forced_order(routing.count_E, T * K)
            count_PE = forced_counts(num_rows_P, self.num_experts, routing.count_E.device)
            traffic = forced_traffic(num_rows_P, self.num_experts, self.rank)
        else:
            slot_S = torch.argsort(routing.expert_TK.flatten(), stable=True)
            count_PE = all_gather_counts(routing.count_E, self.group)
            if torch.compiler.is_compiling():
                traffic = Traffic.traced(count_PE, self.rank)
            else:
                traffic = Traffic.of_counts(read_on_host(count_PE), self.rank)
        self._refuse_unequal_counts_for_bmm(traffic)
        return Plan(
            token_S=slot_S // K,
            weight_S=gather_weights(routing.weight_TK, slot_S),
            num_tokens=T,
            score_before_experts=self.config.score_before_experts,
            rows_per_expert=self._rows_per_expert(traffic, count_PE),
            steps=(self._choose_exchange(traffic, count_PE, T * K), self._choose_permutation(traffic, count_PE)),
        )

    def _is_known_in_advance(self, num_tokens_P: list[int] | None) -> bool:
        """Forced balance, with token counts that all ranks know; parts of experts are not numbered as it needs."""
        if not self.config.force_load_balance or self.parts_per_expert > 1:
            return False
        return self.same_num_tokens or num_tokens_P is not None

    def _choose_exchange(self, traffic: Traffic, count_PE: Tensor, num_sent: int) -> Step:
        """Decided from numbers that are the same on every rank, or the exchange would hang."""
        if not self._splits_equally(traffic):
            return UnevenExchange(
                traffic.send_P, traffic.receive_P, num_sent, traffic.num_received, self.group, self.label
            )
        split_PP = count_PE.unflatten(1, (self.size, -1)).sum(-1)
        return EqualSplitExchange.make(
            traffic.largest_split,
            split_PP[self.rank],
            split_PP[:, self.rank],
            num_sent,
            traffic.num_received,
            self.group,
            self.label,
        )

    def _splits_equally(self, traffic: Traffic) -> bool:
        mode = self.config.equal_split
        # A graph can't branch on numbers it doesn't have yet, so only a forced equal split is traced.
        if mode != "adaptive" or torch.compiler.is_compiling():
            return mode == "forced"
        num_padded = traffic.largest_split * self.size**2
        return num_padded - traffic.num_rows <= self.config.equal_split_threshold * traffic.num_rows

    def _choose_permutation(self, traffic: Traffic, count_PE: Tensor) -> Step:
        mine = self._my_experts()
        if traffic.count_PE is not None:
            lengths = {length for count_E in traffic.count_PE for length in count_E[mine]}
            if len(lengths) == 1 and lengths != {0}:
                return UniformPermutation.make(self.size, mine.stop - mine.start)
        return SegmentPermutation.make(count_PE[:, mine], traffic.num_received)

    def _rows_per_expert(self, traffic: Traffic, count_PE: Tensor) -> Tensor | list[int]:
        mine = self._my_experts()
        if traffic.count_PE is None:
            return count_PE[:, mine].sum(0)
        return [sum(rows) for rows in zip(*(count_E[mine] for count_E in traffic.count_PE), strict=True)]

    def _my_experts(self) -> slice:
        experts_per_rank = self.num_experts // self.size
        return slice(self.rank * experts_per_rank, (self.rank + 1) * experts_per_rank)

    def _forced_order(self, count_E: Tensor, num_rows: int) -> Tensor:
        if torch.compiler.is_compiling():
            return forced_order(count_E, num_rows)
        key = (num_rows, count_E.device)
        if key not in self._forced_orders:
            self._forced_orders.clear()  # one batch shape at a time
            self._forced_orders[key] = forced_order(count_E, num_rows)
        return self._forced_orders[key]

    def _refuse_unequal_counts_for_bmm(self, traffic: Traffic) -> None:
        """Told here, where every rank knows: a rank that found out by itself would leave the others waiting."""
        if self.config.experts_backend != "bmm" or traffic.count_PE is None:
            return
        rows_E = [sum(rows) for rows in zip(*traffic.count_PE, strict=True)]
        if len(set(rows_E)) > 1:
            raise ValueError(
                f"experts_backend 'bmm' needs the same number of rows for every expert, but they get {min(rows_E)} to"
                f" {max(rows_E)}: choose 'loop' or 'auto'"
            )


def route_to_parts(routing: Routing, num_owners: int, parts: int) -> Routing:
    """The routing of rows to the parts of their experts: K * parts visits a token, E * parts experts.

    An owner is a run of `parts` ranks that share e experts; part p of all of them lives on its p-th rank.
    """
    e = routing.count_E.shape[0] // num_owners
    part_p = torch.arange(parts, device=routing.expert_TK.device)
    expert_TK1 = routing.expert_TK.unsqueeze(-1)
    expert_TKp = (expert_TK1 // e * parts + part_p) * e + expert_TK1 % e
    count_OpE = routing.count_E.view(num_owners, 1, e).expand(-1, parts, -1)
    return Routing(
        expert_TK=expert_TKp.flatten(1),
        weight_TK=routing.weight_TK.repeat_interleave(parts, dim=1),
        count_E=count_OpE.flatten(),
    )
