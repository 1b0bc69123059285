"""The vision encoder: turns image patches into features that fill positions of a sequence.

N patches of I images, P patches in the largest; V the encoder's width, H heads of width R; M features, each made of
2 x 2 patches; D width of the text model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from spurline.accelerator import copy_to_device
from spurline.data.batch import Spot
from spurline.data.patch_sizes import MERGE, PATCH_DIM
from spurline.models.common.init import residual_std
from spurline.models.common.rope import Rope, apply_rope_halves, rope_tables
from spurline.models.qwen3_vl.configs import VisionConfig
from spurline.models.qwen3_vl.geometry import Padding, padding_of, patch_places, table_points
from spurline.models.qwen3_vl.layers import BiasedLinear, LayerNorm, PositionTable

_ROPE_THETA = 10_000.0


class VisionAttention(nn.Module):
    """Attention of every patch to all patches of its image: (N, V) -> (N, V)."""

    def __init__(self, config: VisionConfig, output_std: float) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.wqkv = BiasedLinear(config.dim, 3 * config.dim)
        self.wo = BiasedLinear(config.dim, config.dim, std=output_std)

    def forward(self, x_NV: Tensor, rope: Rope, padding: Padding) -> Tensor:
        q_NHR, k_NHR, v_NHR = self.wqkv(x_NV).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q_NHR, k_NHR = apply_rope_halves(q_NHR, *rope), apply_rope_halves(k_NHR, *rope)
        num_pictures = padding.is_real_I11P.shape[0]
        q, k, v = (
            x_NHR.index_select(0, padding.patch_X).unflatten(0, (num_pictures, -1)).transpose(1, 2)
            for x_NHR in (q_NHR, k_NHR, v_NHR)
        )
        out_IHPR = F.scaled_dot_product_attention(q, k, v, attn_mask=padding.is_real_I11P)
        out_XV = out_IHPR.transpose(1, 2).flatten(2).flatten(0, 1)
        return self.wo(out_XV.index_select(0, padding.place_N))


class VisionBlock(nn.Module):
    """Pre-norm residual attention, then a feed-forward with GELU: (N, V) -> (N, V)."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        output_std = residual_std(config.num_layers)
        self.attention_norm = LayerNorm(config.dim)
        self.attention = VisionAttention(config, output_std)
        self.ffn_norm = LayerNorm(config.dim)
        self.w1 = BiasedLinear(config.dim, config.hidden_dim)
        self.w2 = BiasedLinear(config.hidden_dim, config.dim, std=output_std)

    def forward(self, x_NV: Tensor, rope: Rope, padding: Padding) -> Tensor:
        x_NV = x_NV + self.attention(self.attention_norm(x_NV), rope, padding)
        return x_NV + self.w2(F.gelu(self.w1(self.ffn_norm(x_NV)), approximate="tanh"))


class Merger(nn.Module):
    """Merges 2 x 2 adjacent patches into one feature of the text model's width: (N, V) -> (M, D).

    The last layer's patches are normalized before merging, those of DeepStack's layers after it.
    """

    def __init__(self, dim: int, text_dim: int, norm_merged: bool) -> None:
        super().__init__()
        merged_dim = MERGE**2 * dim
        self.norm = LayerNorm(merged_dim if norm_merged else dim)
        self.norm_merged = norm_merged
        self.w1 = BiasedLinear(merged_dim, merged_dim)
        self.w2 = BiasedLinear(merged_dim, text_dim)

    def forward(self, x_NV: Tensor) -> Tensor:
        merged = (-1, MERGE**2 * x_NV.shape[-1])
        x = self.norm(x_NV.reshape(merged)) if self.norm_merged else self.norm(x_NV).reshape(merged)
        return self.w2(F.gelu(self.w1(x)))


class VisionEncoder(nn.Module):
    """Patches (N, C) -> features (M, D) for the sequence, and a list of DeepStack's features, (M, D) each."""

    def __init__(self, config: VisionConfig, text_dim: int) -> None:
        super().__init__()
        self.rotated_dim = config.dim // config.num_heads // 2
        self.patch = BiasedLinear(PATCH_DIM, config.dim)
        self.positions = PositionTable(config.positions_per_side, config.dim)
        self.layers = nn.ModuleDict({str(layer): VisionBlock(config) for layer in range(config.num_layers)})
        self.merger = Merger(config.dim, text_dim, norm_merged=False)
        self.deepstack_layers = config.deepstack_layers
        self.deepstack = nn.ModuleList(Merger(config.dim, text_dim, norm_merged=True) for _ in self.deepstack_layers)

    def forward(self, patches_NC: Tensor, spots: Sequence[Spot]) -> tuple[Tensor, list[Tensor]]:
        device = patches_NC.device
        place_N2 = patch_places(spots)
        points = (copy_to_device(part, device) for part in table_points(spots, place_N2, self.positions.side))
        padding = Padding(*(copy_to_device(part, device) for part in padding_of(spots)))
        rope = self._rope(copy_to_device(place_N2, device))

        x_NV = self.patch(patches_NC)
        x_NV = x_NV + self.positions(*points).to(x_NV.dtype)
        deepstack: list[Tensor] = []
        for layer, block in enumerate(self.layers.values()):
            x_NV = block(x_NV, rope, padding)
            if layer in self.deepstack_layers:
                deepstack.append(self.deepstack[len(deepstack)](x_NV))
        return self.merger(x_NV), deepstack

    def _rope(self, place_N2: Tensor) -> Rope:
        """Half of a head's pairs rotate by the row of a patch, the other half by its column: two of (N, R / 2)."""
        cos, sin = rope_tables(place_N2, self.rotated_dim, _ROPE_THETA)
        return cos.flatten(1), sin.flatten(1)
