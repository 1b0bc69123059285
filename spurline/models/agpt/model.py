"""The AGPT models: a dense decoder with plain grouped-query attention."""

from spurline.models.agpt.configs import AGPTConfig
from spurline.models.common.grouped_query import GroupedQueryDecoder


class AGPT(GroupedQueryDecoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: AGPTConfig
