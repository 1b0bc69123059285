"""A stand-in for `deep_ep.HybridEPBuffer` on gloo ranks, with the signatures of the branch hybrid-ep at 94a9f8f.

T tokens, E experts of which e live on each of P ranks, A rows received, ordered by expert, then rank, then token; each
expert's rows are padded with zeros to a multiple.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.testing.stand_ins.exchange import add_up, check_rows, counts_of_all, send_rows


class HybridEPBuffer:
    def __init__(
        self,
        group: ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        assert hidden_dim % 16 == 0
        assert num_local_experts * self.group_size % 4 == 0, "of an NVLink domain, which all ranks are taken to share"
        self.hidden_dim, self.most_tokens, self.num_local_experts = (
            hidden_dim,
            max_num_of_tokens_per_rank,
            num_local_experts,
        )

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, tuple[Any, ...]]:
        check_rows(hidden)
        assert not non_blocking, "the stand-in knows the blocking call"
        assert hidden.shape[1] == self.hidden_dim
        assert hidden.shape[0] <= self.most_tokens
        assert hidden.shape[0] % 64 * self.group_size % 4 == 0, "the last chunk is copied in multiples of 16 bytes"
        e = self.num_local_experts
        if handle is None:
            assert routing_map is not None
            assert routing_map.dtype == torch.bool
            assert routing_map.shape == (hidden.shape[0], e * self.group_size)
            handle = self._preprocess(routing_map, pad_multiple)
        else:
            assert handle[8] == hidden.shape[0], "this handle is of another number of tokens"
        (place_R, num_places, place_e, send_P, receive_P, token_S, expert_S), count_e = handle[0], handle[7]
        assert num_permuted_tokens in (None, num_places)
        rows_AD = hidden.new_zeros(num_places, hidden.shape[1])
        rows_AD[place_R] = send_rows(hidden[token_S], send_P, receive_P, self.group)
        prob_A = None
        if probs is not None:
            assert probs.dtype == torch.float32
            prob_A = torch.zeros(num_places)
            prob_A[place_R] = send_rows(probs[token_S, expert_S], send_P, receive_P, self.group)
        assert count_e.shape == (e,)
        return rows_AD, prob_A, None, place_e, handle

    def _preprocess(self, routing_map: Tensor, pad_multiple: int | None) -> tuple[Any, ...]:
        e, P = self.num_local_experts, self.group_size
        expert_S, token_S = routing_map.t().nonzero().unbind(1)
        send_P = torch.bincount(expert_S // e, minlength=P).tolist()
        receive_P = counts_of_all(send_P, self.group)
        expert_R = send_rows(expert_S % e, send_P, receive_P, self.group)
        count_e = torch.bincount(expert_R, minlength=e)
        multiple = pad_multiple or 1
        place_e = -(-count_e // multiple) * multiple
        order_R = torch.argsort(expert_R, stable=True)
        in_order_R = expert_R[order_R]
        start_e, first_e = count_e.cumsum(0) - count_e, place_e.cumsum(0) - place_e
        place_R = first_e[in_order_R] + torch.arange(len(order_R)) - start_e[in_order_R]
        place_R = torch.empty_like(place_R).scatter_(0, order_R, place_R)
        maps = (place_R, int(place_e.sum()), place_e, send_P, receive_P, token_S, expert_S)
        return (maps, *[None] * 6, count_e.int(), routing_map.shape[0], None, None)

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert handle is not None
        check_rows(hidden)
        (place_R, num_places, _, send_P, receive_P, token_S, expert_S), num_tokens = handle[0], handle[8]
        assert hidden.shape[0] == num_places
        y_TD = add_up(send_rows(hidden[place_R], receive_P, send_P, self.group), token_S, num_tokens)
        prob_TE = None
        if probs is not None:
            assert probs.dtype == torch.float32
            prob_TE = torch.zeros(num_tokens, self.num_local_experts * self.group_size)
            prob_TE[token_S, expert_S] = send_rows(probs[place_R], receive_P, send_P, self.group)
        return y_TD, prob_TE
