"""The AGPT models: a dense decoder with plain grouped-query attention."""

from torch import nn

from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.decoder import Decoder
from spurline.models.common.grouped_query import GroupedQueryAttention


class AGPT(Decoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: AGPTConfig

    def make_attention(self, layer: int) -> nn.Module:
        return GroupedQueryAttention(self.config, output_std=self.output_std)
