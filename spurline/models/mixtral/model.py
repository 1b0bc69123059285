"""The Mistral and Mixtral models: a decoder with grouped-query attention, with or without a sliding window."""

from spurline.models.common.grouped_query import GroupedQueryDecoder
from spurline.models.mixtral.configs import MistralConfig


class Mixtral(GroupedQueryDecoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: MistralConfig
