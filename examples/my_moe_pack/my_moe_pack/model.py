"""The family's model: a decoder, and what is special about it."""

from torch import Tensor, nn

from my_moe_pack.configs import MyMoEConfig
from spurline.models.common.decoder import Decoder
from spurline.models.common.grouped_query import GroupedQueryAttention


class MyMoE(Decoder):
    """Language model with scaled embeddings: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: MyMoEConfig

    def make_attention(self, layer: int) -> nn.Module:
        return GroupedQueryAttention(self.config, output_std=self.output_std)

    def embed(self, tokens_BL: Tensor) -> Tensor:
        return super().embed(tokens_BL) * self.config.embedding_scale
