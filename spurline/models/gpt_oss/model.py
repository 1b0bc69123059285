"""The gpt-oss models: a decoder with attention sinks, biases and a sliding window in every second layer."""

from spurline.models.common.grouped_query import GroupedQueryDecoder
from spurline.models.gpt_oss.configs import GptOssConfig


class GptOss(GroupedQueryDecoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: GptOssConfig
