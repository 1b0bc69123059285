"""The Qwen3 models: a decoder with grouped-query attention whose queries and keys are normalized in each head."""

from torch import nn

from spurline.models.common.decoder import Decoder
from spurline.models.common.grouped_query import GroupedQueryAttention
from spurline.models.qwen3.configs import Qwen3Config


class Qwen3(Decoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: Qwen3Config

    def make_attention(self, layer: int) -> nn.Module:
        return GroupedQueryAttention(self.config, qk_norm=True, output_std=self.output_std)
