"""Grouped-query attention: several query heads share one head of keys and values.

Shapes: B batch rows, L positions, D model width, H query heads, G heads of keys and values, R head width; S positions
of the KV cache.
"""

import torch
from torch import Tensor, nn

from spurline.comm.gradients import local
from spurline.models.common.cache import attend_to_past
from spurline.models.common.context import BlockContext
from spurline.models.common.decoder import Decoder
from spurline.models.common.decoder_config import AttentionFeatures, GroupedQueryConfig
from spurline.models.common.init import INIT_STD
from spurline.models.common.linear import Linear, SummedLinear
from spurline.models.common.mask import attend, dense_mask
from spurline.models.common.norm import AllHeadsNorm, RMSNorm
from spurline.models.common.rope import Rope, apply_rope_halves
from spurline.models.common.sinks import attend_with_sinks
from spurline.models.common.window import in_window
from spurline.ops.draw import drawn_in_blocks
from spurline.parallel.context import ContextParallel


class GroupedQueryAttention(nn.Module):
    """Causal grouped-query attention with rotary positions: (B, L, D) -> (B, L, D)."""

    def __init__(
        self,
        config: GroupedQueryConfig,
        features: AttentionFeatures | None = None,
        *,
        output_std: float = INIT_STD,
    ) -> None:
        super().__init__()
        features = features or AttentionFeatures()
        self.head_dim, self.rope_dim = config.head_dim, config.rope_dim
        self.window = features.window
        self.softmax_scale = config.head_dim**-0.5 * config.yarn.softmax_scale

        query_dim, key_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.wq = Linear(config.dim, query_dim, bias=features.qkv_bias)
        self.wk = Linear(config.dim, key_dim, bias=features.qkv_bias)
        self.wv = Linear(config.dim, key_dim, bias=features.qkv_bias)
        self.wo = SummedLinear(query_dim, config.dim, std=output_std, bias=features.output_bias)
        self.norms_all_heads = features.qk_norm == "all_heads"
        self.q_norm = self._make_norm(config, query_dim) if features.qk_norm != "none" else None
        self.k_norm = self._make_norm(config, key_dim) if features.qk_norm != "none" else None
        self.sinks_H = nn.Parameter(torch.zeros(config.num_heads)) if features.sinks else None
        self.cp = ContextParallel()
        self.tensor_parallel_dims = {"wq.weight": 0, "wk.weight": 0, "wv.weight": 0, "wo.weight": 1}
        if features.qkv_bias:
            self.tensor_parallel_dims |= {"wq.bias": 0, "wk.bias": 0, "wv.bias": 0}
        if features.sinks:
            self.tensor_parallel_dims["sinks_H"] = 0

    def _make_norm(self, config: GroupedQueryConfig, dim: int) -> RMSNorm:
        return AllHeadsNorm(dim, config.norm_eps) if self.norms_all_heads else RMSNorm(self.head_dim, config.norm_eps)

    @drawn_in_blocks
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None) -> None:
        tensor.zero_()  # sinks

    def forward(self, x_BLD: Tensor, context: BlockContext) -> Tensor:
        q, k, v = self.wq(x_BLD), self.wk(x_BLD), self.wv(x_BLD)
        if self.q_norm is not None and self.k_norm is not None and self.norms_all_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        # Under tensor parallelism a rank holds some of the heads: those of its shard of the projection.
        q_BLHR, k_BLGR, v_BLGR = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and not self.norms_all_heads:
            q_BLHR, k_BLGR = self.q_norm(q_BLHR), self.k_norm(k_BLGR)
        q_BLHR, k_BLGR = self._rotate(q_BLHR, context.rope), self._rotate(k_BLGR, context.rope)
        q_BLHR = self.cp.queries(q_BLHR, context.shard)
        k_BLGR, v_BLGR = self.cp.keys_and_values(k_BLGR, v_BLGR, context.shard)
        out_BHLR = self._attend(q_BLHR.transpose(1, 2), k_BLGR.transpose(1, 2), v_BLGR.transpose(1, 2), context)
        return self.wo(self.cp.outputs(out_BHLR.transpose(1, 2), context.shard).flatten(2))

    def _rotate(self, x_BLHR: Tensor, rope: Rope) -> Tensor:
        """Rotate the first rope_dim channels of each head; the others are unchanged."""
        if self.rope_dim == self.head_dim:
            return apply_rope_halves(x_BLHR, *rope)
        rotated, rest = x_BLHR.split([self.rope_dim, self.head_dim - self.rope_dim], dim=-1)
        return torch.cat([apply_rope_halves(rotated, *rope), rest], dim=-1)

    def _attend(self, q_BHLR: Tensor, k_BGLR: Tensor, v_BGLR: Tensor, context: BlockContext) -> Tensor:
        cache, mask, shard = context.cache, context.mask, context.shard
        sinks_H = None if self.sinks_H is None else self.cp.own_heads(local(self.sinks_H), shard).to(q_BHLR.dtype)
        num_keys = k_BGLR.shape[-2]
        if cache is not None:
            k_BGSR, v_BGSR = cache.extend(k_BGLR, v_BGLR)
            mask, num_keys = cache.mask, k_BGSR.shape[-2]
        if self.window or sinks_H is not None:
            query_L = shard.positions(q_BHLR.device) if shard and self.cp.attends_from_own_positions else None
            mask = in_window(dense_mask(mask), q_BHLR, num_keys, self.window, query_L)
        if cache is not None and cache.has_past:
            return attend_to_past(q_BHLR, k_BGSR, v_BGSR, dense_mask(mask), self.softmax_scale, sinks_H)
        if sinks_H is not None:
            return attend_with_sinks(q_BHLR, k_BGLR, v_BGLR, sinks_H, dense_mask(mask), self.softmax_scale)
        return attend(q_BHLR, k_BGLR, v_BGLR, mask, self.softmax_scale)


class GroupedQueryDecoder(Decoder):
    """A decoder with grouped-query attention in all layers, with the features that its config selects."""

    config: GroupedQueryConfig

    def make_attention(self, layer: int) -> nn.Module:
        features = self.config.attention_features(layer)
        return GroupedQueryAttention(self.config, features, output_std=self.output_std)
