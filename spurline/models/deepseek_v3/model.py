"""The DeepSeek-V3 model: a decoder with latent attention in every block."""

from spurline.models.common.attention import LatentAttention
from spurline.models.common.decoder import Decoder
from spurline.models.deepseek_v3.configs import DeepSeekV3Config


class DeepSeekV3(Decoder):
    """Language model: tokens (B, L) -> logits (B, L, vocab_size)."""

    def __init__(self, config: DeepSeekV3Config) -> None:
        super().__init__(
            config,
            lambda output_std: LatentAttention(
                config.dim,
                config.num_heads,
                q_lora_rank=config.q_lora_rank,
                kv_lora_rank=config.kv_lora_rank,
                qk_nope_head_dim=config.qk_nope_head_dim,
                qk_rope_head_dim=config.qk_rope_head_dim,
                v_head_dim=config.v_head_dim,
                yarn=config.yarn,
                norm_eps=config.norm_eps,
                output_std=output_std,
            ),
        )
