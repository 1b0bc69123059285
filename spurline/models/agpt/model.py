"""The AGPT models: a dense decoder with plain grouped-query attention."""

from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.decoder import Decoder
from spurline.models.common.grouped_query import GroupedQueryAttention


class AGPT(Decoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    def __init__(self, config: AGPTConfig) -> None:
        super().__init__(config, lambda output_std: GroupedQueryAttention(config, output_std=output_std))
