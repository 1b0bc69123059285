"""The reference implementation of an MoE layer, in plain loops. Every other path is tested against it.

Slow on purpose: one token, one expert at a time. `weights` are the layer's parameters and buffers by name.
"""

from collections.abc import Container

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.moe.config import MoEConfig


def reference_moe(
    x_TD: Tensor, weights: dict[str, Tensor], config: MoEConfig, dropped: Container[tuple[int, int]] = ()
) -> Tensor:
    """(T, D) -> (T, D). Rows (token, expert) that are `dropped`, for lack of capacity, contribute nothing."""
    w1_EFD, w3_EFD, w2_EDF = (weights[f"experts.{name}"] for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
    score_TE = reference_scores(x_TD, weights, config)[1]
    outputs = []
    for t, x_D in enumerate(x_TD):
        y_D = torch.zeros_like(x_D)
        chosen = reference_choice(score_TE[t], t, weights["router.expert_bias_E"], config)
        norm = sum(score_TE[t, e] for e in chosen) + 1e-20 if config.route_norm else 1.0
        for e in chosen:
            if (t, e) in dropped:
                continue
            weight = (score_TE[t, e] / norm * config.route_scale).to(x_D.dtype)
            row_D = x_D * weight if config.score_before_experts else x_D
            row_D = w2_EDF[e] @ (F.silu(w1_EFD[e] @ row_D) * (w3_EFD[e] @ row_D))
            y_D = y_D + (row_D if config.score_before_experts else row_D * weight)
        if config.num_shared_experts:
            w1_FD, w3_FD, w2_DF = (weights[f"shared_experts.{name}"] for name in ("w1_FD", "w3_FD", "w2_DF"))
            shared_D = w2_DF @ (F.silu(w1_FD @ x_D) * (w3_FD @ x_D))
            if config.shared_gate:
                shared_D = shared_D * (weights["shared_experts.gate_1D"] @ x_D).sigmoid()
            y_D = y_D + shared_D
        outputs.append(y_D)
    return torch.stack(outputs) if outputs else x_TD.clone()


def reference_scores(x_TD: Tensor, weights: dict[str, Tensor], config: MoEConfig) -> tuple[Tensor, Tensor]:
    """(T, D) -> gate logits and scores (T, E), in at least fp32."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    logit_TE = x_TD.to(dtype) @ weights["router.gate_ED"].to(dtype).t()
    if config.gate_bias:
        logit_TE = logit_TE + weights["router.gate_bias_E"].to(dtype)
    return logit_TE, logit_TE.softmax(-1) if config.score_func == "softmax" else logit_TE.sigmoid()


def reference_choice(score_E: Tensor, token: int, bias_E: Tensor, config: MoEConfig) -> list[int]:
    """The K experts of one token, from the best groups only: best biased score first, ties by lower id."""
    E, K, size = config.num_experts, config.top_k, config.num_experts // config.num_groups
    if config.force_load_balance:
        return [(token * K + k) % E for k in range(K)]
    biased = (score_E + bias_E).tolist()
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    groups.sort(key=lambda group: -sum(sorted((biased[e] for e in group), reverse=True)[:2]))
    eligible = sorted(e for group in groups[: config.num_limited_groups] for e in group)
    return sorted(eligible, key=lambda e: -biased[e])[:K]


def reference_balance_loss(x_BLD: Tensor, weights: dict[str, Tensor], config: MoEConfig) -> Tensor:
    """(B, L, D) -> the weighted balance and z losses of one call, as a mean over its tokens."""
    B, L, _ = x_BLD.shape
    batches = [x_BLD.flatten(0, 1)] if config.aux_loss == "batch" else list(x_BLD)
    offset, loss = 0, x_BLD.new_zeros((), dtype=torch.promote_types(x_BLD.dtype, torch.float32))
    for x_TD in batches:
        logit_TE, score_TE = reference_scores(x_TD, weights, config)
        share_E = torch.zeros_like(score_TE[0])
        for t in range(len(x_TD)):
            for e in reference_choice(score_TE[t], offset + t, weights["router.expert_bias_E"], config):
                share_E[e] += 1 / (len(x_TD) * config.top_k)
        probability_E = (score_TE / score_TE.sum(-1, keepdim=True)).mean(0)
        if config.aux_loss != "none":
            balance = config.num_experts * (share_E * probability_E).sum()
            loss = loss + config.aux_loss_weight * balance * len(x_TD) / (B * L)
        loss = loss + config.z_loss_weight * logit_TE.logsumexp(-1).square().sum() / (B * L)
        offset += len(x_TD)
    return loss
