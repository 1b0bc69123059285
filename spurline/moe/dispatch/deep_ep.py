"""Dispatch by DeepEP, whose kernels move tokens between GPUs: a token is sent once to each rank that has its experts.

T tokens of this rank, K experts per token, E experts of which e live on each of P ranks, R tokens that reach this rank.
`Buffer.dispatch` returns received tokens, their experts and weights, and a handle; `Buffer.combine` uses the handle to
send outputs back and sum them. Each is the gradient of the other. Received tokens are sorted by expert as on one device
(`local.py`), and their outputs are summed by token before they are sent back.

Written against `deep_ep.Buffer` of v1.2.1 and of 2.1.0; run on CPU ranks with a stand-in (`testing/stand_ins`) only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.distributed import ProcessGroup

from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.aligned import round_up
from spurline.moe.dispatch.all_to_all import route_to_parts
from spurline.moe.dispatch.capacity import fixed_counts
from spurline.moe.dispatch.libraries import require_library
from spurline.moe.dispatch.local import LocalDispatcher, LocalPlan, plan_rows
from spurline.moe.dispatch.plan import ExpertRanks, Plan
from spurline.moe.dispatch.sentinel import SentinelPlan
from spurline.moe.router import count_rows
from spurline.moe.routing import Routing
from spurline.moe.rows import RowCounts, Rows
from spurline.moe.telemetry import counted

WIDEST_ROW = 8184
"""The normal kernels copy half a row of bfloat16 at a time, into 8192 bytes that hold a barrier of 8 bytes too."""

# The limits of the low-latency kernels. Beyond them, the normal kernels are used.
LOW_LATENCY_RANKS = 8
"""With more, the normal kernels use NVSHMEM too, which a process can't initialize for both (DeepEP's issue 76)."""
LOW_LATENCY_TOKENS = 256
"""Places for a rank's tokens. The library recommends no more, and asserts 2 (places + 1) <= NVSHMEM_QP_DEPTH, 1024."""
LOW_LATENCY_EXPERTS = 11
"""Experts of a token."""
LOW_LATENCY_WIDTHS = (2048, 2560, 4096, 5120, 6144, 7168)
"""Those of both versions that normal kernels take too."""
SMALLEST_STEP = 16
"""The low-latency layout has a multiple of this many places for a rank's tokens."""


class DeepEPDispatcher:
    """Plans by DeepEP's normal kernels across ranks; on one device, rows stay where they are."""

    name: ClassVar[str] = "deep_ep"

    def __init__(self, config: MoEConfig, ranks: ExpertRanks | None = None) -> None:
        require_library(self.name)
        self.config, self.ranks = config, ranks
        self.overlap = True  # common to all dispatchers, unused here: the library's events order what overlaps

    def across(self, ranks: ExpertRanks) -> DeepEPDispatcher:
        if problem := self.unsupported(ranks):
            raise ValueError(f"{ranks.layer}: dispatcher {self.name!r} {problem}: choose dispatcher 'local'")
        return type(self)(self.config, ranks)

    def unsupported(self, ranks: ExpertRanks) -> str:
        """What the library has no kernels for, if anything."""
        width, num_ranks = self.config.dim, ranks.group.size()
        if width % 16 or width > WIDEST_ROW:
            return f"sends rows whose width is a multiple of 16 and at most {WIDEST_ROW}, not {width}"
        try:
            library().Buffer.get_dispatch_config(num_ranks)
        except AssertionError:
            return f"has no kernels for {num_ranks} ranks"
        return ""

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        if self.ranks is None:
            return LocalDispatcher(self.config).plan(routing, num_tokens_P)
        if torch.compiler.is_compiling():
            raise ValueError(
                f"dispatcher {self.name!r} calls a library that can't be traced: leave the model uncompiled"
            )
        return DeepEPPlan(self.config, self.ranks.group, self._routed(routing))

    def _routed(self, routing: Routing) -> Routing:
        assert self.ranks is not None
        parts = self.ranks.parts_per_expert
        return route_to_parts(routing, self.ranks.group.size() // parts, parts) if parts > 1 else routing


class DeepEPLowLatencyDispatcher(DeepEPDispatcher):
    """The same with the low-latency kernels if gradients are off: fixed capacity, no device-to-host reads.

    They do not send routing weights to the experts, so no gradient of the weights could come back: training uses the
    normal kernels, and so do weights that apply before the experts, and whatever is beyond the kernels' limits.
    """

    name = "deep_ep_low_latency"

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        ranks, (T, K) = self.ranks, routing.expert_TK.shape
        is_known = ranks is not None and (ranks.same_num_tokens or num_tokens_P is not None)
        if torch.is_grad_enabled() or self.config.score_before_experts or not is_known:
            return super().plan(routing, num_tokens_P)
        assert ranks is not None
        most = round_up(max(num_tokens_P or [T]), max(SMALLEST_STEP, self.config.row_multiple))
        widths = getattr(library(), "low_latency_widths", LOW_LATENCY_WIDTHS)  # a stand-in has others
        if (
            ranks.group.size() > LOW_LATENCY_RANKS
            or most > LOW_LATENCY_TOKENS
            or K * ranks.parts_per_expert > LOW_LATENCY_EXPERTS
            or self.config.dim not in widths
        ):
            return super().plan(routing, num_tokens_P)
        return LowLatencyPlan(ranks.group, self._routed(routing), most)


@dataclass
class Journey:
    """What the library's dispatch returns that combine needs."""

    buffer: Any
    handle: Any
    expert_RK: Tensor
    """The experts of each received token as ids local to this rank; -1 for experts of other ranks."""
    host_e: list[int]
    """Rows of each expert of this rank."""


@dataclass
class DeepEPPlan:
    config: MoEConfig
    group: ProcessGroup
    routing: Routing
    journey: Journey | None = None
    local: LocalPlan | SentinelPlan | None = None
    """Maps received tokens to rows and back; set together with the journey."""

    def dispatch(self, x_TD: Tensor) -> Rows:
        """Tokens are sent when experts need rows, overlapping work queued so far: the library waits for counts."""
        check_dtype(x_TD, "deep_ep")
        # The library's stream waits for this event only, so no tensor may be copied behind it.
        x_TD, weight_TK = x_TD.contiguous(), self.routing.weight_TK.float().contiguous()
        expert_TK = self.routing.expert_TK.contiguous()
        ready = library().Buffer.capture()
        start = partial(self._start, x_TD, weight_TK, expert_TK, ready)
        return Rows(x_TD, RowCounts(self.routing.count_E), start=start)

    @counted("exchange.deep_ep")
    def _start(self, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, ready: Any) -> Rows:
        x_RD, weight_RK = _Dispatch.apply(x_TD, weight_TK, expert_TK, ready, self)
        journey = self.journey
        assert journey is not None
        (R, K), e = journey.expert_RK.shape, len(journey.host_e)
        # Slots of other ranks' experts are sorted last, and cut off.
        expert_S = torch.where(journey.expert_RK < 0, e, journey.expert_RK).flatten()
        slot_S = torch.argsort(expert_S, stable=True)[: sum(journey.host_e)]
        # Counts are not given as host integers: ranks could make different decisions based on them.
        count_e, host_count_e = count_rows(expert_S, e + 1)[:e], torch.tensor(journey.host_e)
        counts = RowCounts(count_e, host_count_e=host_count_e)
        self.local = plan_rows(self.config, slot_S, weight_RK.flatten(), counts, R, K)
        rows = self.local.dispatch(x_RD)
        # A kernel that gathers rows by itself would add them to this rank's own tokens.
        return rows if rows.token_S is None else replace(rows, x=rows.tensor(), token_S=None)

    def combine(self, rows: Rows) -> Tensor:
        assert self.local is not None
        y_RD = self.local.combine(replace(rows, onto_TD=None))
        y_TD = _Combine.apply(y_RD, self.journey)
        return y_TD if rows.onto_TD is None else rows.onto_TD + y_TD


class _Dispatch(Function):
    """Sends tokens and weights, complete at `ready`, to the ranks of their experts; gradients come back by combine."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, ready: Any, plan: DeepEPPlan
    ) -> tuple[Tensor, Tensor]:
        num_experts = plan.routing.count_E.shape[0]
        buffer = normal_buffer(plan.group, x_TD.shape[1] * x_TD.element_size())
        per_rank, per_rdma_rank, per_expert, is_in_rank, laid_out = buffer.get_dispatch_layout(
            expert_TK, num_experts, previous_event=ready, async_finish=True, allocate_on_comm_stream=True
        )
        x_RD, expert_RK, weight_RK, host_e, handle, arrived = buffer.dispatch(
            x_TD,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=expert_TK,
            topk_weights=weight_TK,
            previous_event=laid_out,
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        arrived.current_stream_wait()
        ctx.journey = plan.journey = Journey(buffer, handle, expert_RK, host_e)
        return x_RD, weight_RK

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor, grad_RK: Tensor) -> tuple[Tensor | None, ...]:
        return *_bring_back(ctx.journey, grad_RD, grad_RK.contiguous()), None, None, None


class _Combine(Function):
    """Sends outputs back and sums them by token; the gradient is dispatched as the tokens were."""

    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return _bring_back(journey, y_RD, None)[0]

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        buffer = ctx.journey.buffer
        grad_RD, *_, arrived = buffer.dispatch(
            grad_TD.contiguous(),
            handle=ctx.journey.handle,
            previous_event=buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        arrived.current_stream_wait()
        return grad_RD, None


def _bring_back(journey: Journey, rows_RD: Tensor, weight_RK: Tensor | None) -> tuple[Tensor, Tensor | None]:
    rows_TD, weight_TK, arrived = journey.buffer.combine(
        rows_RD.contiguous(),
        journey.handle,
        topk_weights=weight_RK,
        previous_event=journey.buffer.capture(),
        async_finish=True,
        allocate_on_comm_stream=True,
    )
    arrived.current_stream_wait()
    return rows_TD, weight_TK


@dataclass
class LowLatencyPlan:
    """Without gradients: every expert has a place for each token of each rank, M = P * most_tokens of them.

    Empty places hold arbitrary values: their outputs are not sent back.
    """

    group: ProcessGroup
    routing: Routing
    most_tokens: int
    journey: tuple[Any, Any] | None = None

    def dispatch(self, x_TD: Tensor) -> Rows:
        check_dtype(x_TD, "deep_ep_low_latency")
        E, P, D = self.routing.count_E.shape[0], self.group.size(), x_TD.shape[1]
        buffer = low_latency_buffer(self.group, D, E)
        expert_TK = self.routing.expert_TK.contiguous()
        x_eMD, _, handle, _, receive = buffer.low_latency_dispatch(
            x_TD.contiguous(), expert_TK, self.most_tokens, E, use_fp8=False, return_recv_hook=True
        )
        self.journey = buffer, handle
        counts = fixed_counts(self.routing, E // P, P * self.most_tokens)
        return Rows(x_TD, counts, start=partial(self._receive, receive, x_eMD, counts))

    @counted("exchange.deep_ep_low_latency")
    def _receive(self, receive: Any, x_eMD: Tensor, counts: RowCounts) -> Rows:
        receive()
        return Rows(x_eMD.flatten(0, 1), counts)

    def combine(self, rows: Rows) -> Tensor:
        assert self.journey is not None
        buffer, handle = self.journey
        E, P = self.routing.count_E.shape[0], self.group.size()
        y_TD, *_ = buffer.low_latency_combine(
            rows.x.view(E // P, P * self.most_tokens, -1),
            self.routing.expert_TK.contiguous(),
            self.routing.weight_TK.float().contiguous(),
            handle,
        )
        return y_TD if rows.onto_TD is None else rows.onto_TD + y_TD


def library() -> Any:
    """The DeepEP module, imported on first use."""
    import deep_ep

    return deep_ep


def check_dtype(x_TD: Tensor, dispatcher: str) -> None:
    if x_TD.dtype not in getattr(library(), "row_dtypes", (torch.bfloat16,)):  # a stand-in may take others
        raise ValueError(
            f"dispatcher {dispatcher!r} moves rows in bfloat16, not in {x_TD.dtype}: choose"
            " --training.dtype bfloat16, or dispatcher 'local'"
        )


_buffers: dict[tuple[Any, ...], Any] = {}
"""The buffers, shared by all layers: by group and row size, and those of the low-latency kernels by experts too.

None is ever replaced: releasing a buffer ends NVSHMEM, which the one in its place would use.
"""


def normal_buffer(group: ProcessGroup, row_bytes: int) -> Any:
    if (group, row_bytes) not in _buffers:
        Buffer, P = library().Buffer, group.size()
        configs = (Buffer.get_dispatch_config(P), Buffer.get_combine_config(P))
        nvl = max(config.get_nvl_buffer_size_hint(row_bytes, P) for config in configs)
        rdma = max(config.get_rdma_buffer_size_hint(row_bytes, P) for config in configs)
        _buffers[group, row_bytes] = Buffer(group, nvl, rdma)
    return _buffers[group, row_bytes]


def low_latency_buffer(group: ProcessGroup, width: int, num_experts: int) -> Any:
    """A buffer for the most tokens, so that it suffices whenever there are more than the first time."""
    if (group, width, num_experts) not in _buffers:
        Buffer, P = library().Buffer, group.size()
        num_bytes = Buffer.get_low_latency_rdma_size_hint(LOW_LATENCY_TOKENS, width, P, num_experts)
        buffer = Buffer(group, 0, num_bytes, low_latency_mode=True, num_qps_per_rank=num_experts // P)
        _buffers[group, width, num_experts] = buffer
    return _buffers[group, width, num_experts]
