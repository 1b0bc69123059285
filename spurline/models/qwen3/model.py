"""The Qwen3 models: a decoder with grouped-query attention whose queries and keys are normalized in each head."""

from spurline.models.common.grouped_query import GroupedQueryDecoder
from spurline.models.qwen3.configs import Qwen3Config


class Qwen3(GroupedQueryDecoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: Qwen3Config
