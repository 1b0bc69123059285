"""The DeepSeek-V3 model: a decoder with latent attention in every block, and multi-token prediction."""

from typing import Any

import torch
from torch import Tensor, nn

from spurline.comm.sequence import HeadTailShard, SequenceShard
from spurline.models.common.attention import LatentAttention
from spurline.models.common.decoder import Decoder
from spurline.models.common.loss import LossSum
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.models.deepseek_v3.mtp import PredictionModule
from spurline.parallel.context import own


class DeepSeekV3(Decoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size).

    In training mode, the loss includes that of the multi-token prediction modules. Logits, validation and generation do
    not use them.
    """

    config: DeepSeekV3Config

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__(config)
        last = config.num_layers - 1  # a prediction module has one more block like the last one
        self.mtp = nn.ModuleDict(
            {str(k): PredictionModule(config, self.make_attention(last)) for k in range(config.num_mtp_layers)}
        )

    def make_attention(self, layer: int) -> nn.Module:
        config = self.config
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
            output_std=self.output_std,
        )

    def last_stage_modules(self) -> set[str]:
        """Prediction modules read the last hidden state, so they need a copy of the embedding on the last stage."""
        return super().last_stage_modules() | ({"mtp", "embedding"} if self.config.num_mtp_layers else {"mtp"})

    def blocks(self) -> list[nn.Module]:
        """The modules that activation checkpointing, compile and FSDP2 wrap individually."""
        return [*self.layers.values(), *self.mtp.values()]

    def loss(
        self, hidden_BLD: Tensor, tokens_BL: Tensor, labels_BL: Tensor, loss_sum: LossSum, **extras: Any
    ) -> Tensor:
        if not self.mtp or not self.training:
            return super().loss(hidden_BLD, tokens_BL, labels_BL, loss_sum)
        ahead = self.mtp_hidden_states(hidden_BLD, tokens_BL, **extras)
        labels = [self._own_ahead(labels_BL, k) for k in range(len(ahead) + 1)]
        loss, *losses = self.loss_sums([hidden_BLD, *ahead], labels, loss_sum)
        return loss + self.config.mtp_loss_weight * torch.stack(losses).mean()

    def mtp_hidden_states(
        self, hidden_BLD: Tensor, tokens_BL: Tensor, documents_BL: Tensor | None = None
    ) -> list[Tensor]:
        """The output of each prediction module, from the last hidden state (B, L, D): module k has L - k positions.

        Module k, from 1 on, reads at position i the hidden state of the previous module (or of the model) and the
        embedding of token i + k, and predicts the token after it. The last k positions have no such token: they are
        dropped, and so are neither routed nor counted.
        """
        if tokens_BL.shape[1] <= len(self.mtp):
            raise ValueError(
                f"sequences of {tokens_BL.shape[1]} tokens are too short for model.num_mtp_layers {len(self.mtp)}:"
                " raise training.seq_len"
            )
        found = []
        for k, module in enumerate(self.mtp.values(), 1):
            length = tokens_BL.shape[1] - k
            its_documents_BL = None if documents_BL is None else documents_BL[:, :length]
            shard = self._shard_ahead(tokens_BL, k)
            context = self.block_context(tokens_BL[:, :length], documents_BL=its_documents_BL, shard=shard)
            hidden_BlD = self._own_positions(hidden_BLD[:, : context.length])
            x_BlD = module(hidden_BlD, self.embed(self._own_ahead(tokens_BL, k)), context)
            hidden_BLD = self.tp.all_gather_sequence(x_BlD, context.length)
            found.append(hidden_BLD)
        return found

    def _shard_ahead(self, tokens_BL: Tensor, k: int) -> HeadTailShard | None:
        """Context parallelism: a rank keeps its positions of the last hidden state, except the sequence's last k."""
        shard = self.shard_of(tokens_BL)
        return None if shard is None else shard.shortened(k)

    def _own_ahead(self, x_BL: Tensor, k: int) -> Tensor:
        """The element k ahead of each of this rank's positions: (B, L) -> (B, l), or (B, L - k) if it holds all."""
        return own(x_BL[:, k:], self._shard_ahead(x_BL, k))

    def _own_positions(self, x_BLD: Tensor) -> Tensor:
        """This rank's shard of positions that every rank of the tp group holds: (B, L, D) -> (B, l, D)."""
        size = 1 if self.tp.group is None else self.tp.group.size()
        return SequenceShard(x_BLD.shape[1], size, self.tp.rank).shard(x_BLD, dim=1)
