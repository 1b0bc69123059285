"""The family's model: a decoder, and what is special about it."""

from torch import Tensor

from my_moe_pack.configs import MyMoEConfig
from spurline.models.common.decoder import Decoder
from spurline.models.common.grouped_query import GroupedQueryAttention


class MyMoE(Decoder):
    """Language model with scaled embeddings: tokens (B, L) -> logits (B, L, vocab_size)."""

    def __init__(self, config: MyMoEConfig) -> None:
        super().__init__(config, lambda output_std: GroupedQueryAttention(config, qk_norm=False, output_std=output_std))
        self.embedding_scale = config.embedding_scale

    def embed(self, tokens_BL: Tensor) -> Tensor:
        return super().embed(tokens_BL) * self.embedding_scale
