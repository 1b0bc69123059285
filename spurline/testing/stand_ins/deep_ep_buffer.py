"""A stand-in for `deep_ep.Buffer` on gloo ranks, with the signatures of DeepEP 2.1.0 (a superset of v1.2.1).

T tokens, K experts per token, R tokens received, P ranks, e experts on each. Tokens arrive in rank order, and in their
original order within a rank; expert ids of a received token are local to this rank, or -1 for experts elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.testing.stand_ins.exchange import add_up, check_rows, counts_of_all, send_rows

NUM_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
"""The numbers of ranks that the library has configurations for."""
QUEUE_DEPTH = 1024
low_latency_widths = (16, 2048)
"""Widths of the low-latency kernels: one for tests, and one that the library has."""


class Config:
    """Buffer sizes, which the stand-in does not need."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class EventOverlap:
    """An event for calls that are complete on return; waiting fails if the library would have returned no event."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        assert self.event is not None, "an event is returned with async_finish only"


class Buffer:
    num_sms: int = 20

    def __init__(
        self,
        group: ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        assert group is not None
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.low_latency_mode, self.num_qps_per_rank = low_latency_mode, num_qps_per_rank
        self.num_rdma_bytes = num_rdma_bytes

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap("captured")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in NUM_RANKS
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        assert num_ranks in NUM_RANKS
        return Config()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 2 * num_experts * num_max_dispatch_tokens_per_rank * hidden * 2

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        e = num_experts // self.group_size
        is_in_rank_TP = torch.stack([(topk_idx // e == rank).any(1) for rank in range(self.group_size)], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return is_in_rank_TP.sum(0).int(), None, per_expert, is_in_rank_TP, _event(async_finish)

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, tuple[Any, ...] | None, EventOverlap]:
        check_rows(x)
        assert x.shape[1] % 16 == 0
        assert x.shape[1] + 8 <= 8192, "half a row of bfloat16 and a barrier"
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            send_P, receive_P = _splits(handle)
            return send_rows(x[_sent(handle)], send_P, receive_P, self.group), *[None] * 4, _event(async_finish)  # type: ignore[return-value]
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        send_P = num_tokens_per_rank.tolist()
        receive_P = counts_of_all(send_P, self.group)
        token_S = is_token_in_rank.t().nonzero()[:, 1]
        source_R = send_rows(token_S.int(), send_P, receive_P, self.group)
        handle = (torch.tensor([send_P, receive_P]), None, None, source_R, is_token_in_rank, None)
        e = num_tokens_per_expert.shape[0] // self.group_size
        owner_S1 = torch.arange(self.group_size).repeat_interleave(torch.tensor(send_P))[:, None]
        expert_SK, weight_SK = topk_idx[token_S], topk_weights[token_S]
        is_there_SK = expert_SK // e == owner_S1
        expert_RK = send_rows(torch.where(is_there_SK, expert_SK - owner_S1 * e, -1), send_P, receive_P, self.group)
        weight_RK = send_rows(torch.where(is_there_SK, weight_SK, 0.0), send_P, receive_P, self.group)
        x_RD = send_rows(x[token_S], send_P, receive_P, self.group)
        count_e = torch.bincount(expert_RK[expert_RK >= 0], minlength=e)
        aligned = -(-count_e // expert_alignment) * expert_alignment
        return x_RD, expert_RK, weight_RK, aligned.tolist(), handle, _event(async_finish)

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Any = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        check_rows(x)
        _check_streams(previous_event, async_finish, allocate_on_comm_stream)
        send_P, receive_P = _splits(handle)
        assert x.shape[0] == sum(receive_P), "combine takes as many tokens as dispatch has received"
        token_S, num_tokens = _sent(handle), handle[4].shape[0]
        y_TD = add_up(send_rows(x, receive_P, send_P, self.group), token_S, num_tokens)
        weight_TK = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32
            weight_TK = add_up(send_rows(topk_weights, receive_P, send_P, self.group), token_S, num_tokens)
        return y_TD, weight_TK, _event(async_finish)

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        pass

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None] | None]:
        check_rows(x)
        assert self.low_latency_mode
        assert not use_fp8, "the stand-in sends bfloat16"
        e, P, most = num_experts // self.group_size, self.group_size, num_max_dispatch_tokens_per_rank
        assert self.num_qps_per_rank == e, "one queue pair for each local expert"
        assert (most + 1) * 2 <= QUEUE_DEPTH
        assert topk_idx.shape[1] <= 11
        assert x.shape[1] in low_latency_widths
        assert x.shape[0] <= most
        assert self.num_rdma_bytes >= self.get_low_latency_rdma_size_hint(most, x.shape[1], P, num_experts)
        slot_S = torch.argsort(topk_idx.flatten(), stable=True)
        token_S, expert_S = slot_S // topk_idx.shape[1], topk_idx.flatten()[slot_S]
        send_P = torch.bincount(expert_S // e, minlength=P).tolist()
        receive_P = counts_of_all(send_P, self.group)
        rows_R = send_rows(x[token_S], send_P, receive_P, self.group)
        expert_R = send_rows(expert_S % e, send_P, receive_P, self.group)
        order_R = torch.argsort(expert_R, stable=True)
        count_e = torch.bincount(expert_R, minlength=e)
        starts_e = count_e.cumsum(0) - count_e
        place_R = expert_R[order_R] * (most * P) + torch.arange(len(order_R)) - starts_e[expert_R[order_R]]
        packed = torch.full((e * most * P, x.shape[1]), torch.nan, dtype=x.dtype)  # nothing may rely on empty slots
        received = torch.full_like(packed, torch.nan)
        packed[place_R] = rows_R[order_R]

        def receive() -> None:
            received.copy_(packed)

        if not return_recv_hook:
            receive()
        back_R = torch.empty_like(place_R).scatter_(0, order_R, place_R)
        handle = ((back_R, send_P, receive_P, slot_S), None, most, x.shape[1], num_experts)
        hook = receive if return_recv_hook else None
        return received.view(e, most * P, -1), count_e.int(), handle, _event(async_finish), hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        (back_R, send_P, receive_P, slot_S), _, most, hidden, num_experts = handle
        assert x.shape == (num_experts // self.group_size, most * self.group_size, hidden)
        assert topk_weights.dtype == torch.float32
        rows_S = send_rows(x.flatten(0, 1)[back_R], receive_P, send_P, self.group)
        weighed_S = rows_S.float() * topk_weights.flatten()[slot_S, None]
        y_TD = add_up(weighed_S, slot_S // topk_idx.shape[1], topk_idx.shape[0]).to(x.dtype)
        return y_TD, _event(async_finish), (lambda: None) if return_recv_hook else None


def _event(async_finish: bool) -> EventOverlap:
    return EventOverlap("finished" if async_finish else None)


def _check_streams(previous_event: EventOverlap | None, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    if allocate_on_comm_stream:
        assert previous_event is not None, "tensors of the communication stream need an event to wait for"
        assert async_finish, "tensors of the communication stream need async_finish"


def _splits(handle: tuple[Any, ...]) -> tuple[list[int], list[int]]:
    send_P, receive_P = handle[0].tolist()
    return send_P, receive_P


def _sent(handle: tuple[Any, ...]) -> Tensor:
    """The token of each row that this rank sent, in rank order."""
    return handle[4].t().nonzero()[:, 1]
