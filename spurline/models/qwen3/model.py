"""The Qwen3 models: a decoder with grouped-query attention whose queries and keys are normalized in each head."""

from spurline.models.common.decoder import Decoder
from spurline.models.common.grouped_query import GroupedQueryAttention
from spurline.models.qwen3.configs import Qwen3Config


class Qwen3(Decoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, lambda output_std: GroupedQueryAttention(config, qk_norm=True, output_std=output_std))
