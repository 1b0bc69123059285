"""The GLM-4.5 models: a decoder with grouped-query attention and partial RoPE."""

from spurline.models.common.grouped_query import GroupedQueryDecoder
from spurline.models.glm4_moe.configs import Glm4MoEConfig


class Glm4MoE(GroupedQueryDecoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    config: Glm4MoEConfig
