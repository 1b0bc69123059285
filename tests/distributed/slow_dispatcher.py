"""An asynchronous dispatcher in one file, with a handle as in libraries that move rows on the device.

Rows travel by gloo's all-to-all on a thread of their own; whoever needs them asks the handle. T tokens, K experts per
token, S rows that leave this rank, R rows that reach it, D width.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function

from spurline.moe import MoEConfig, Routing, RowCounts, Rows, register_dispatcher
from spurline.moe.dispatch.local import LocalDispatcher, LocalPlan
from spurline.moe.dispatch.plan import ExpertRanks

_threads = ThreadPoolExecutor(1)


class Handle:
    """An exchange in flight."""

    def __init__(self, rows: Tensor, send_P: list[int], receive_P: list[int], group: dist.ProcessGroup) -> None:
        self.future: Future[Tensor] = _threads.submit(self._travel, rows.detach().clone(), send_P, receive_P, group)

    @staticmethod
    def _travel(rows: Tensor, send_P: list[int], receive_P: list[int], group: dist.ProcessGroup) -> Tensor:
        received = rows.new_empty(sum(receive_P), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), receive_P, send_P, group=group)
        return received


class _Arrive(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, handle: Handle, send_P: list[int], receive_P: list[int], group: Any) -> Tensor:
        ctx.splits, ctx.group = (send_P, receive_P), group
        return handle.future.result()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        send_P, receive_P = ctx.splits
        return Handle(grad, receive_P, send_P, ctx.group).future.result(), None, None, None, None


@dataclass(frozen=True)
class Arrival:
    rows_SD: Tensor
    handle: Handle
    plan: "SlowPlan"

    def wait(self) -> Tensor:
        rows_RD = _Arrive.apply(self.rows_SD, self.handle, self.plan.send_P, self.plan.receive_P, self.plan.group)
        return rows_RD.index_select(0, self.plan.order_R)


@dataclass(frozen=True)
class SlowPlan:
    local: LocalPlan
    send_P: list[int]
    receive_P: list[int]
    order_R: Tensor
    """Received row of each place in the order of experts."""
    counts: RowCounts
    group: dist.ProcessGroup

    def dispatch(self, x_TD: Tensor) -> Rows:
        rows_SD = x_TD.index_select(0, self.local.token_S)
        handle = Handle(rows_SD, self.send_P, self.receive_P, self.group)
        return Rows(rows_SD, self.counts, weight_S=self.local.weight_S, arrival=Arrival(rows_SD, handle, self))

    def combine(self, rows: Rows) -> Tensor:
        back_R = torch.empty_like(self.order_R).scatter_(0, self.order_R, torch.arange(len(self.order_R)))
        rows_RD = rows.x.index_select(0, back_R)
        handle = Handle(rows_RD, self.receive_P, self.send_P, self.group)
        rows_SD = _Arrive.apply(rows_RD, handle, self.receive_P, self.send_P, self.group)
        y_TD = torch.zeros(self.local.num_tokens, rows_SD.shape[1]) if rows.onto_TD is None else rows.onto_TD
        return y_TD.index_add(0, self.local.token_S, rows_SD * self.local.weight_S.unsqueeze(1))


class SlowDispatcher:
    def __init__(self, config: MoEConfig, ranks: ExpertRanks | None = None) -> None:
        self.config, self.ranks = config, ranks

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> SlowPlan | LocalPlan:
        local = LocalDispatcher(self.config).plan(routing)
        if self.ranks is None:
            return local
        group = self.ranks.group
        P, rank, E = group.size(), group.rank(), self.config.num_experts
        everyone = [torch.empty_like(routing.count_E) for _ in range(P)]
        dist.all_gather(everyone, routing.count_E, group=group)
        count_PPe = torch.stack(everyone).view(P, P, E // P)
        mine_Pe = count_PPe[:, rank]
        expert_R = torch.arange(E // P).repeat(P).repeat_interleave(mine_Pe.flatten())
        return SlowPlan(
            local,
            count_PPe[rank].sum(-1).tolist(),
            mine_Pe.sum(-1).tolist(),
            torch.argsort(expert_R, stable=True),
            RowCounts.on_host(mine_Pe.sum(0).tolist()),
            group,
        )

    def across(self, ranks: ExpertRanks) -> "SlowDispatcher":
        return SlowDispatcher(self.config, ranks)


register_dispatcher("slow", SlowDispatcher)
