"""The router: which experts each token visits, and with what weight.

T tokens, D width, E experts, K experts per token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from spurline.comm.gradients import local
from spurline.comm.metrics import Metric
from spurline.moe.balance import attach_loss, balance_loss, count_rows_by_sequence
from spurline.moe.config import MoEConfig
from spurline.moe.metrics import router_metrics
from spurline.moe.routing import Routing
from spurline.ops.draw import drawn_in_blocks, fill_truncated_normal
from spurline.ops.functional import accumulate_once, stable_topk

if TYPE_CHECKING:
    from spurline.moe.routing_tape import RoutingTape


class Router(nn.Module):
    """Scores experts in fp32, selects K of them for each token and keeps their load balanced."""

    gate_ED: nn.Parameter
    expert_bias_E: Tensor
    row_count_E: Tensor
    balance_loss: Tensor
    token_weight: Tensor
    metrics_of_parent = True  # reported as the MoE layer's
    keeps_float32 = True  # FSDP2 gathers the gate in float32, whatever the dtype of other weights

    def __init__(self, config: MoEConfig, init_std: float = 0.02) -> None:
        super().__init__()
        self.config = config
        self.init_std = init_std
        self.balance_group: ProcessGroup | None = None  # the ranks whose tokens form one batch for the balance loss
        self.tape: RoutingTape | None = None  # see `put_on_tape`
        self.layer = ""  # its name on the tape
        self.step_count_E: Tensor | None = None  # rows over all ranks, between the last two balance updates
        self.gate_ED = nn.Parameter(torch.empty(config.num_experts, config.dim))
        self.gate_bias_E = nn.Parameter(torch.empty(config.num_experts)) if config.gate_bias else None
        self.register_buffer("expert_bias_E", torch.empty(config.num_experts, dtype=torch.float32))
        for name, shape, dtype in (
            ("row_count_E", config.num_experts, torch.int64),  # rows since the last balance update
            ("balance_loss", (), torch.float32),  # balance and z losses since `reset_metrics`
            ("token_weight", (), torch.float32),  # of one token in the step's loss; 0: 1 / tokens of the call
        ):
            self.register_buffer(name, torch.empty(shape, dtype=dtype), persistent=False)
        self.init_buffers()

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        if name == "gate_bias_E":
            tensor.zero_()
            return
        fill_truncated_normal(tensor, self.init_std, generator)

    def init_buffers(self) -> None:
        for buffer in self.buffers(recurse=False):
            buffer.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # The buffers are accumulators: `.bfloat16()` on the model must not round them.
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            if self._buffers[name].dtype != buffer.dtype:  # type: ignore[union-attr]
                self._buffers[name] = buffer.to(self._buffers[name].device)  # type: ignore[union-attr]
        return self

    def forward(self, x_TD: Tensor, num_sequences: int = 1) -> Routing:
        """(T, D) -> Routing; the tokens are num_sequences sequences of equal length, concatenated."""
        config = self.config
        logit_TE = self.logits(x_TD)
        score_TE = logit_TE.softmax(-1) if config.score_func == "softmax" else logit_TE.sigmoid()

        host_count_E = None
        if config.force_load_balance:
            expert_TK, count_E, host_count_E = self._forced_balance(x_TD)
        else:
            expert_TK = self.select_experts(score_TE.detach())
            if self.tape is not None:
                expert_TK = self.tape.decided(self.layer, expert_TK)
            count_E = count_rows(expert_TK, config.num_experts)

        weight_TK = score_TE.gather(1, expert_TK)
        if config.route_norm:
            weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + 1e-20)
        if config.route_scale != 1:
            weight_TK = weight_TK * config.route_scale

        if self.tape is not None:
            self.tape.note(self.layer, expert_TK, weight_TK)
        if self.training:
            accumulate_once(self.row_count_E, count_E, self.expert_bias_E, torch.is_grad_enabled())
        if self.training and torch.is_grad_enabled() and (config.aux_loss != "none" or config.z_loss_weight):
            weight_TK = self._with_balance_loss(weight_TK, logit_TE, score_TE, expert_TK, num_sequences)
        return Routing(expert_TK, weight_TK, count_E, host_count_E)

    def metrics(self) -> dict[str, Metric]:
        return router_metrics(self)

    def reset_metrics(self) -> None:
        self.balance_loss.zero_()

    def logits(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (T, E), in at least fp32: a model in fp64 keeps its precision."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        bias_E = None if self.gate_bias_E is None else local(self.gate_bias_E).to(dtype)
        return F.linear(x_TD.to(dtype), local(self.gate_ED).to(dtype), bias_E)

    def select_experts(self, score_TE: Tensor) -> Tensor:
        """The K best experts of each token by biased score, ties by lower id."""
        biased_TE = score_TE + self.expert_bias_E
        if self.config.num_groups > 1:
            biased_TE = self._only_best_groups(biased_TE)
        return stable_topk(biased_TE, self.config.top_k)

    def _only_best_groups(self, biased_TE: Tensor) -> Tensor:
        T, E = biased_TE.shape
        G = self.config.num_groups
        biased_TGe = biased_TE.view(T, G, E // G)
        group_score_TG = biased_TGe.topk(2, dim=-1).values.sum(-1)
        assert self.config.num_limited_groups is not None
        best_Tg = stable_topk(group_score_TG, self.config.num_limited_groups)
        closed_TG = torch.ones_like(group_score_TG, dtype=torch.bool).scatter(1, best_Tg, False)
        return biased_TGe.masked_fill(closed_TG.unsqueeze(-1), -torch.inf).view(T, E)

    def _forced_balance(self, x_TD: Tensor) -> tuple[Tensor, Tensor, list[int] | None]:
        """Token-slot i goes to expert i % E, so the first T*K % E experts get one row more than the others."""
        E, K = self.config.num_experts, self.config.top_k
        num_rows = x_TD.shape[0] * K
        expert_TK = (torch.arange(num_rows, device=x_TD.device) % E).view(-1, K)
        count_E = (num_rows + E - 1 - torch.arange(E, device=x_TD.device)) // E
        # While tracing, a list of E symbols would be less useful than the tensor.
        known = None if torch.compiler.is_compiling() else [(num_rows + E - 1 - e) // E for e in range(E)]
        return expert_TK, count_E, known

    def _with_balance_loss(
        self, weight_TK: Tensor, logit_TE: Tensor, score_TE: Tensor, expert_TK: Tensor, num_sequences: int
    ) -> Tensor:
        config = self.config
        rows_SE = count_rows_by_sequence(config, expert_TK, num_sequences, self.balance_group)
        mean_weight = config.top_k / rows_SE.sum().clamp_min(1).to(logit_TE.dtype)
        loss = balance_loss(config, logit_TE, score_TE, rows_SE)
        loss = loss * torch.where(self.token_weight > 0, self.token_weight.to(loss.dtype), mean_weight)
        accumulate_once(self.balance_loss, loss.detach().float(), self.expert_bias_E, True)
        return attach_loss(weight_TK, loss)


def count_rows(expert_TK: Tensor, num_experts: int) -> Tensor:
    """(T, K) -> (E,): how many token-slots chose each expert."""
    expert_S = expert_TK.flatten()
    return expert_S.new_zeros(num_experts).scatter_add_(0, expert_S, torch.ones_like(expert_S))
