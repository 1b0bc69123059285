"""The DeepSeek-V3 model: a decoder with latent attention in every block, which may predict more than one token."""

from typing import Any

import torch
from torch import Tensor, nn

from spurline.comm.sequence import SequenceShard
from spurline.models.common.attention import LatentAttention
from spurline.models.common.decoder import Decoder, LossSum
from spurline.models.common.init import residual_std
from spurline.models.common.mask import mask_of_documents
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.models.deepseek_v3.mtp import PredictionModule


class DeepSeekV3(Decoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size).

    With prediction modules, the loss of a model that trains has theirs in it. Nothing else takes notice of them.
    """

    def __init__(self, config: DeepSeekV3Config) -> None:
        def make_attention(output_std: float) -> LatentAttention:
            return LatentAttention(
                config.dim,
                config.num_heads,
                q_lora_rank=config.q_lora_rank,
                kv_lora_rank=config.kv_lora_rank,
                qk_nope_head_dim=config.qk_nope_head_dim,
                qk_rope_head_dim=config.qk_rope_head_dim,
                v_head_dim=config.v_head_dim,
                yarn=config.yarn,
                norm_eps=config.norm_eps,
                output_std=output_std,
            )

        super().__init__(config, make_attention)
        output_std = residual_std(config.num_layers)
        self.mtp = nn.ModuleDict(
            {str(k): PredictionModule(config, make_attention(output_std)) for k in range(config.num_mtp_layers)}
        )
        self.mtp_loss_weight = config.mtp_loss_weight

    def blocks(self) -> list[nn.Module]:
        """What is recomputed, compiled and sharded by itself."""
        return [*self.layers.values(), *self.mtp.values()]

    def loss(self, x_BLD: Tensor, tokens_BL: Tensor, labels_BL: Tensor, loss_sum: LossSum, **extras: Any) -> Tensor:
        loss = super().loss(x_BLD, tokens_BL, labels_BL, loss_sum)
        if not self.mtp or not self.training:
            return loss
        return loss + self.mtp_loss_sum(x_BLD, tokens_BL, labels_BL, loss_sum, **extras)

    def mtp_loss_sum(
        self,
        x_BLD: Tensor,
        tokens_BL: Tensor,
        labels_BL: Tensor,
        loss_sum: LossSum,
        documents_BL: Tensor | None = None,
    ) -> Tensor:
        """What the prediction modules add to the summed loss: (B, L, D), as the output head sees it, and (B, L) twice.

        Module k, from 1 on, reads at position i what the head saw there before it and token i + k, to predict the token
        after that. The last k positions have no such token: they are cut off, and so are neither routed nor counted.
        """
        if tokens_BL.shape[1] <= len(self.mtp):
            raise ValueError(
                f"sequences of {tokens_BL.shape[1]} tokens are too short for model.num_mtp_layers {len(self.mtp)}:"
                " raise training.seq_len"
            )
        losses = []
        for k, module in enumerate(self.mtp.values(), 1):
            length = tokens_BL.shape[1] - k
            rope = self.rope(torch.arange(length, device=tokens_BL.device))
            x_BlD = self._own_positions(x_BLD[:, :length])
            mask_B1LL = None if documents_BL is None else mask_of_documents(documents_BL[:, :length])
            x_BlD = module(x_BlD, self.embed(tokens_BL[:, k:]), rope, length, mask_B1LL)
            x_BLD = self.tp.all_gather_sequence(x_BlD, length)
            losses.append(self._loss_by_chunks(x_BLD.flatten(0, 1), labels_BL[:, k:].flatten(), loss_sum))
        return self.mtp_loss_weight * torch.stack(losses).mean()

    def _own_positions(self, x_BLD: Tensor) -> Tensor:
        """This rank's share of what all ranks of tp have: (B, L, D) -> (B, l, D)."""
        size = 1 if self.tp.group is None else self.tp.group.size()
        return SequenceShard(x_BLD.shape[1], size, self.tp.rank).shard(x_BLD, dim=1)
