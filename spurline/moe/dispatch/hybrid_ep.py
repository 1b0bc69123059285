"""Dispatch by HybridEP, NVIDIA's kernels for NVLink domains and RDMA: rows arrive sorted by expert.

T tokens of this rank, E experts of which e live on each of P ranks, A rows that reach this rank's experts, each
expert's padded with zeros to `row_multiple`. `dispatch_with_permute` takes a routing map (T, E) and a probability for
each pair, and returns rows, their probabilities and a handle; `combine_with_unpermute` uses the handle to sum them
back. Each is the gradient of the other.

Written against `deep_ep.HybridEPBuffer` of DeepEP's branch hybrid-ep at commit 94a9f8f; run on CPU ranks with a
stand-in (`testing/stand_ins`) only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed import ProcessGroup

from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.aligned import round_up
from spurline.moe.dispatch.deep_ep import DeepEPDispatcher, check_dtype, library
from spurline.moe.dispatch.plan import ExpertRanks, Plan
from spurline.moe.routing import Routing
from spurline.moe.rows import RowCounts, Rows
from spurline.moe.telemetry import counted

TOKEN_MULTIPLE = 4
"""The library copies 4 bytes for each token and each rank of an NVLink domain, in multiples of 16 bytes."""


class HybridEPDispatcher(DeepEPDispatcher):
    """Plans by HybridEP across ranks; on one device, rows stay where they are."""

    name: ClassVar[str] = "hybrid_ep"

    def unsupported(self, ranks: ExpertRanks) -> str:
        width, num_experts = self.config.dim, self.config.num_experts * ranks.parts_per_expert
        if width % 16:
            return f"sends rows whose width is a multiple of 16, not {width}"
        return f"needs experts in multiples of 4, not {num_experts}" if num_experts % 4 else ""

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        if self.ranks is None or torch.compiler.is_compiling():
            return super().plan(routing, num_tokens_P)
        is_known_to_differ = num_tokens_P is not None and len(set(num_tokens_P)) > 1
        if is_known_to_differ or (num_tokens_P is None and not self.ranks.same_num_tokens):
            raise ValueError(
                f"{self.ranks.layer}: dispatcher 'hybrid_ep' needs the same number of tokens on every rank: choose a"
                " sequence length that tensor parallelism divides, or dispatcher 'local'"
            )
        return HybridEPPlan(self.config, self.ranks.group, self._routed(routing))


@dataclass
class Journey:
    """What the library's dispatch returns that combine needs."""

    buffer: Any
    handle: Any
    multiple: int | None
    host_count_e: Tensor
    """Rows of each expert of this rank, including padding; on the host."""


@dataclass
class HybridEPPlan:
    config: MoEConfig
    group: ProcessGroup
    routing: Routing
    journey: Journey | None = None

    def dispatch(self, x_TD: Tensor) -> Rows:
        """Tokens are sent when experts need rows, after work queued so far: the library waits for their number."""
        check_dtype(x_TD, "hybrid_ep")
        return Rows(x_TD, RowCounts(self.routing.count_E), start=partial(self._start, x_TD))

    @counted("exchange.hybrid_ep")
    def _start(self, x_TD: Tensor) -> Rows:
        expert_TK, weight_TK = self.routing.expert_TK, self.routing.weight_TK.float()
        num_tokens = round_up(x_TD.shape[0], TOKEN_MULTIPLE)  # those that are added visit no expert
        x_TD = F.pad(x_TD, (0, 0, 0, num_tokens - x_TD.shape[0])) if num_tokens > x_TD.shape[0] else x_TD
        weight_TE = weight_TK.new_zeros(num_tokens, self.routing.count_E.shape[0]).scatter(1, expert_TK, weight_TK)
        rows_AD, weight_A = _Dispatch.apply(x_TD, weight_TE, self)
        journey = self.journey
        assert journey is not None
        # Counts are not given as host integers: ranks could make different decisions based on them.
        count_e = journey.host_count_e.to(x_TD.device, non_blocking=True)
        counts = RowCounts(count_e, host_count_e=journey.host_count_e)
        if self.config.score_before_experts:
            return Rows(rows_AD * weight_A.to(rows_AD.dtype).unsqueeze(-1), counts)
        return Rows(rows_AD, counts, weight_S=weight_A, weigh_inside=True)

    def combine(self, rows: Rows) -> Tensor:
        y_AD = rows.x if rows.weight_S is None else rows.weigh(rows.x)
        y_TD, num_tokens = _Combine.apply(y_AD, self.journey), self.routing.expert_TK.shape[0]
        y_TD = y_TD[:num_tokens] if y_TD.shape[0] > num_tokens else y_TD
        return y_TD if rows.onto_TD is None else rows.onto_TD + y_TD


class _Dispatch(Function):
    """Sends rows and weights to the ranks of their experts; the gradient comes back by combine."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_TE: Tensor, plan: HybridEPPlan) -> tuple[Tensor, Tensor]:
        (T, D), E = x_TD.shape, weight_TE.shape[1]
        is_routed_TE = torch.zeros_like(weight_TE, dtype=torch.bool).scatter(1, plan.routing.expert_TK, True)
        multiple = plan.config.row_multiple if plan.config.row_multiple > 1 else None
        buffer = buffer_for(plan.group, D, T, E // plan.group.size())
        rows_AD, weight_A, _, place_e, handle = buffer.dispatch_with_permute(
            hidden=x_TD.contiguous(), routing_map=is_routed_TE, probs=weight_TE.contiguous(), pad_multiple=multiple
        )
        # place_e is in pinned memory, and complete: the library has waited for it.
        ctx.journey = plan.journey = Journey(buffer, handle, multiple, place_e)
        return rows_AD, weight_A

    @staticmethod
    def backward(ctx: Any, grad_AD: Tensor, grad_A: Tensor) -> tuple[Tensor | None, ...]:
        journey = ctx.journey
        grad_TD, grad_TE = journey.buffer.combine_with_unpermute(
            hidden=grad_AD.contiguous(),
            probs=grad_A.contiguous(),
            handle=journey.handle,
            pad_multiple=journey.multiple,
        )
        return grad_TD, grad_TE, None


class _Combine(Function):
    """Sends outputs back and sums them by token; the gradient is dispatched as the rows were."""

    @staticmethod
    def forward(ctx: Any, y_AD: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.buffer.combine_with_unpermute(
            hidden=y_AD.contiguous(), handle=journey.handle, pad_multiple=journey.multiple
        )[0]

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        journey = ctx.journey
        grad_AD, *_ = journey.buffer.dispatch_with_permute(
            hidden=grad_TD.contiguous(),
            handle=journey.handle,
            num_permuted_tokens=int(journey.host_count_e.sum()),
            pad_multiple=journey.multiple,
        )
        return grad_AD, None


_buffers: dict[ProcessGroup, tuple[tuple[int, int, int], Any]] = {}
"""The buffer of each group, shared by all layers: recreated for another width, more tokens or other experts."""


def buffer_for(group: ProcessGroup, width: int, num_tokens: int, num_experts: int) -> Any:
    made = _buffers.get(group)
    if made is None or made[0][0] != width or made[0][1] < num_tokens or made[0][2] != num_experts:
        buffer = library().HybridEPBuffer(
            group=group, hidden_dim=width, max_num_of_tokens_per_rank=num_tokens, num_local_experts=num_experts
        )
        made = _buffers[group] = (width, num_tokens, num_experts), buffer
    return made[1]
