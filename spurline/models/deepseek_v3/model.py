"""The DeepSeek-V3 model: latent attention in every block; the first blocks are dense, the others have experts."""

from spurline.models.common.attention import LatentAttention
from spurline.models.common.decoder import Decoder, DecoderBlock
from spurline.models.common.feed_forward import FeedForward
from spurline.models.common.init import INIT_STD, residual_std
from spurline.models.deepseek_v3.configs import DeepSeekV3Config
from spurline.moe import MoE


class DeepSeekV3(Decoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__(
            vocab_size=config.vocab_size,
            dim=config.dim,
            num_layers=config.num_layers,
            norm_eps=config.norm_eps,
            make_block=lambda layer: make_block(config, layer),
        )
        self.config = config


def make_block(config: DeepSeekV3Config, layer: int) -> DecoderBlock:
    """Block number `layer` of the model: dense below `num_dense_layers`, sparse from there on."""
    output_std = residual_std(config.num_layers)
    attention = LatentAttention(
        config.dim,
        config.num_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
        output_std=output_std,
    )
    if layer < config.num_dense_layers:
        feed_forward = FeedForward(config.dim, config.dense_hidden_dim, output_std)
        return DecoderBlock(config.dim, config.norm_eps, attention, feed_forward=feed_forward)
    return DecoderBlock(config.dim, config.norm_eps, attention, moe=MoE(config.layer_moe(), INIT_STD, output_std))
