"""The Qwen2 models: a decoder whose queries, keys and values have biases."""

from spurline.models.common.grouped_query import GroupedQueryDecoder
from spurline.models.qwen2_moe.configs import Qwen2Config


class Qwen2(GroupedQueryDecoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: Qwen2Config
