"""The OLMoE models: a decoder whose queries and keys are normalized over all heads."""

from spurline.models.common.grouped_query import GroupedQueryDecoder
from spurline.models.olmoe.configs import OLMoEConfig


class OLMoE(GroupedQueryDecoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: OLMoEConfig
