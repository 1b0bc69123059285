"""The GLM-4.5 family's config and presets. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spurline.config import RunConfig
from spurline.models.common.decoder_config import AttentionFeatures, GroupedQueryConfig, SparseDecoderConfig
from spurline.models.common.presets import debug_run, full_size_run, spread_experts
from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.models.glm4_moe.model import Glm4MoE


@dataclass(frozen=True)
class Glm4MoEConfig(SparseDecoderConfig, GroupedQueryConfig):
    """Grouped-query attention with partial RoPE; experts with sigmoid scores, balanced by a selection bias."""

    num_dense_layers: int = 1
    """Number of blocks at the start with a dense feed-forward instead of an MoE layer."""
    qkv_bias: bool = True
    """Biases in the query, key and value projections."""
    qk_norm: bool = False
    """Normalize the queries and keys of each head."""
    rotary_fraction: float = 0.5
    """Fraction of each head's channels, counted from the first, that rotary position embedding rotates."""

    def problems(self) -> list[str]:
        found = super().problems()
        if not 0 < self.rotary_fraction <= 1:
            found.append(f"rotary_fraction must be above 0 and at most 1, got {self.rotary_fraction}")
        return found

    def build(self) -> Glm4MoE:
        from spurline.models.glm4_moe.model import Glm4MoE

        return Glm4MoE(self)

    @property
    def rope_dim(self) -> int:
        return int(self.head_dim * self.rotary_fraction)

    def attention_features(self, layer: int) -> AttentionFeatures:
        return AttentionFeatures(qkv_bias=self.qkv_bias, qk_norm="head" if self.qk_norm else "none")


def _moe(**sizes: Any) -> MoEConfig:
    return MoEConfig(
        score_func="sigmoid", route_norm=True, num_shared_experts=1, aux_loss="sequence", aux_loss_weight=1e-4, **sizes
    )


def glm4_moe_debugmodel() -> RunConfig[Glm4MoEConfig]:
    """A tiny model with 8 experts, 2 per token, and a shared one, that learns in seconds on a CPU."""
    moe = _moe(hidden_dim=96, num_experts=8, top_k=2, bias_update_rate=1e-2)
    return debug_run(Glm4MoEConfig(dim=128, num_layers=3, dense_hidden_dim=384, head_dim=32, qk_norm=True, moe=moe))


_PUBLISHED: dict[str, Any] = {
    "vocab_size": 151_552,
    "num_heads": 96,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
}


def glm4_5_air() -> RunConfig[Glm4MoEConfig]:
    """GLM-4.5-Air: 46 layers of width 4096 with 128 experts, 8 per token, and a shared one."""
    moe = _moe(hidden_dim=1408, num_experts=128, top_k=8, bias_update_rate=1e-3)
    model = Glm4MoEConfig(dim=4096, num_layers=46, dense_hidden_dim=10_944, moe=moe, **_PUBLISHED)
    return spread_experts(full_size_run(model, lr=2.5e-4), 8)


def glm4_5() -> RunConfig[Glm4MoEConfig]:
    """GLM-4.5: 92 layers of width 5120 with 160 experts, 8 per token, and a shared one."""
    moe = _moe(hidden_dim=1536, num_experts=160, top_k=8, route_scale=2.5, bias_update_rate=1e-3)
    model = Glm4MoEConfig(
        dim=5120, num_layers=92, num_dense_layers=3, dense_hidden_dim=12_288, qk_norm=True, moe=moe, **_PUBLISHED
    )
    return spread_experts(full_size_run(model, lr=2.5e-4), 32, resend_rows=True)


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset for preset in (glm4_moe_debugmodel, glm4_5_air, glm4_5)
}
