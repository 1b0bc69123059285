"""Load balancing of experts: the auxiliary-loss-free selection bias, balance losses, and the router z-loss.

T tokens, E experts, K experts per token, S sequences.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from spurline.comm.collectives import all_reduce_counts
from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from spurline.moe.router import Router


def count_rows_by_sequence(
    config: MoEConfig, expert_TK: Tensor, num_sequences: int, group: ProcessGroup | None
) -> Tensor:
    """(T, K) -> (S, E): rows per expert in each sequence, or (1, E) in the batch, summed over the ranks of group."""
    S = num_sequences if config.aux_loss == "sequence" else 1
    expert_SX = expert_TK.view(S, expert_TK.numel() // max(S, 1))
    rows_SE = expert_SX.new_zeros(S, config.num_experts).scatter_add_(1, expert_SX, torch.ones_like(expert_SX))
    return rows_SE if group is None else all_reduce_counts(rows_SE, group)


def balance_loss(config: MoEConfig, logit_TE: Tensor, score_TE: Tensor, rows_SE: Tensor) -> Tensor:
    """The balance and z losses, weighted and summed over tokens: divide by the number of tokens for a mean.

    The balance loss of a batch (or of each sequence) is E * sum over experts of (share of rows) * (mean probability):
    1 when even, E when one expert takes all. As a sum over tokens it adds up over micro-batches and ranks.
    """
    loss = logit_TE.new_zeros(())
    if config.aux_loss != "none":
        S, E = rows_SE.shape
        probability_STE = (score_TE / score_TE.sum(-1, keepdim=True)).view(S, score_TE.shape[0] // max(S, 1), E)
        share_SE = rows_SE / rows_SE.sum(1, keepdim=True).clamp_min(1).to(score_TE.dtype)
        loss = loss + config.aux_loss_weight * E * (share_SE * probability_STE.sum(1)).sum()
    if config.z_loss_weight:
        loss = loss + config.z_loss_weight * logit_TE.logsumexp(-1).square().sum()
    return loss


def attach_loss(weight_TK: Tensor, loss: Tensor) -> Tensor:
    """Return weight_TK unchanged, with `loss` attached: its backward pass also backpropagates the loss.

    This lets a layer have auxiliary losses and still return one tensor, also under recomputation and compile.
    """
    return _AttachLoss.apply(weight_TK, loss)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_TK: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return weight_TK.view_as(weight_TK)

    @staticmethod
    def backward(ctx: Any, grad_TK: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad_TK, torch.ones_like(loss)


def routers(model: nn.Module) -> dict[str, Router]:
    """All routers of the model, by the name of their MoE layer; by their own name if they share it with others."""
    from spurline.moe.router import Router

    found = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    layer_of = {name: name.rpartition(".")[0] for name in found}
    per_layer = Counter(layer_of.values())
    return {layer_of[name] if per_layer[layer_of[name]] == 1 else name: router for name, router in found.items()}


@torch.no_grad()
def update_expert_bias(
    model: nn.Module, group: ProcessGroup | None = None, unless: Tensor | None = None
) -> dict[str, Tensor]:
    """Update the selection bias of every MoE layer; returns each layer's rows per expert (E,) since the last call.

    The rows are summed over `group` in one all-reduce for all layers, so every rank of it must make this call. The
    default is all ranks if torch.distributed is initialized (each trained on different tokens, as under DDP, which
    must be created with forward_sync_buffers=False). The bias of an expert rises by the update rate if it got fewer
    rows than the mean and falls if it got more; the moves of a layer are centered to sum to zero. No bias moves if
    `unless`, a scalar on the device, is 1: for steps whose update is masked. A router whose parameters are all frozen
    keeps its bias, and with it its selection.
    """
    layers = routers(model)
    if not layers:
        return {}
    _refuse_overwritten_counts(model)
    counts = torch.cat([router.row_count_E for router in layers.values()])
    if group is not None or torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts, group=group)
    sizes = [router.config.num_experts for router in layers.values()]
    count_by_layer = dict(zip(layers, counts.split(sizes), strict=True))
    for name, router in layers.items():
        rate = router.config.bias_update_rate
        if rate and any(parameter.requires_grad for parameter in router.parameters()):
            count_E = count_by_layer[name].float()
            move_E = torch.sign(count_E.mean() - count_E)
            move_E = rate * (move_E - move_E.mean())
            router.expert_bias_E += move_E if unless is None else torch.where(unless > 0, 0.0, move_E)
        router.step_count_E = count_by_layer[name]
        router.row_count_E.zero_()
    return count_by_layer


def _refuse_overwritten_counts(model: nn.Module) -> None:
    """A ValueError if DDP overwrites the row counts of all ranks but the first, which it does by default."""
    for ddp in model.modules():
        if isinstance(ddp, DistributedDataParallel) and ddp.forward_sync_buffers:
            counts = {name for name, _ in ddp.module.named_buffers() if name.endswith("row_count_E")}
            if counts - ddp.parameters_to_ignore:
                raise ValueError(
                    "DistributedDataParallel copies all buffers from rank 0 before each forward pass, so the rows that"
                    " other ranks have counted in earlier micro-batches are lost: create it with"
                    " forward_sync_buffers=False"
                )


def set_token_weight(model: nn.Module, token_weight: float | Tensor) -> None:
    """Set the weight of one token in the step's loss, so that balance and z losses weight tokens the same way.

    It is the factor of a token's own loss in the loss that `backward` is called on. The default, 1 / the tokens of the
    call, is that of a mean over one batch. With gradient accumulation or a GradScaler, call this before each step with
    loss_scale / tokens_of_the_step, where the tokens are those of all micro-batches.
    """
    for router in routers(model).values():
        router.token_weight.fill_(token_weight)
