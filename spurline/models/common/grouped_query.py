"""Grouped-query attention: several query heads share one head of keys and values.

Shapes: B batch rows, L positions, D model width, H query heads, G heads of keys and values, R head width.
"""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from spurline.models.common.cache import LayerKVCache, attend_to_past
from spurline.models.common.context import BlockContext
from spurline.models.common.decoder_config import GroupedQueryConfig
from spurline.models.common.init import INIT_STD
from spurline.models.common.linear import Linear
from spurline.models.common.norm import RMSNorm
from spurline.models.common.rope import apply_rope_halves


class GroupedQueryAttention(nn.Module):
    """Causal grouped-query attention with rotary positions: (B, L, D) -> (B, L, D).

    With qk_norm, each head's query and key are normalized, by one weight for all heads, before they are rotated.
    """

    tensor_parallel_dims: ClassVar = {"wq.weight": 0, "wk.weight": 0, "wv.weight": 0, "wo.weight": 1}

    def __init__(self, config: GroupedQueryConfig, *, qk_norm: bool = False, output_std: float = INIT_STD) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.softmax_scale = config.head_dim**-0.5 * config.yarn.softmax_scale

        self.wq = Linear(config.dim, config.num_heads * config.head_dim)
        self.wk = Linear(config.dim, config.num_kv_heads * config.head_dim)
        self.wv = Linear(config.dim, config.num_kv_heads * config.head_dim)
        self.wo = Linear(config.num_heads * config.head_dim, config.dim, std=output_std)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if qk_norm else None

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        # Under tensor parallelism a rank has some of the heads: as many as its part of the projection.
        q_BLHR, k_BLGR, v_BLGR = (w(x_BLD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q_BLHR, k_BLGR = self.q_norm(q_BLHR), self.k_norm(k_BLGR)
        q_BHLR = apply_rope_halves(q_BLHR, *context.rope).transpose(1, 2)
        k_BGLR = apply_rope_halves(k_BLGR, *context.rope).transpose(1, 2)
        out_BHLR = self._attend(q_BHLR, k_BGLR, v_BLGR.transpose(1, 2), context.cache, context.mask_B1LL)
        return self.wo(out_BHLR.transpose(1, 2).flatten(2))

    def _attend(
        self, q_BHLR: Tensor, k_BGLR: Tensor, v_BGLR: Tensor, cache: LayerKVCache | None, mask_B1LS: Tensor | None
    ) -> Tensor:
        if cache is not None:
            k_BGSR, v_BGSR = cache.extend(k_BGLR, v_BGLR)
            mask_B1LS = cache.mask
            if cache.has_past:
                return attend_to_past(q_BHLR, k_BGSR, v_BGSR, mask_B1LS, self.softmax_scale)
        return F.scaled_dot_product_attention(
            q_BHLR,
            k_BGLR,
            v_BGLR,
            attn_mask=mask_B1LS,
            is_causal=mask_B1LS is None,
            scale=self.softmax_scale,
            enable_gqa=True,
        )
