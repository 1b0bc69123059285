"""The OLMoE family's config and presets. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spurline.config import RunConfig
from spurline.models.common.decoder_config import AttentionFeatures, GroupedQueryConfig, SparseDecoderConfig
from spurline.models.common.presets import debug_run, full_size_run
from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.models.olmoe.model import OLMoE


@dataclass(frozen=True)
class OLMoEConfig(SparseDecoderConfig, GroupedQueryConfig):
    """Queries and keys are normalized over the channels of all heads together."""

    def build(self) -> OLMoE:
        from spurline.models.olmoe.model import OLMoE

        return OLMoE(self)

    def attention_features(self, layer: int) -> AttentionFeatures:
        return AttentionFeatures(qk_norm="all_heads")


def olmoe_debugmodel() -> RunConfig[OLMoEConfig]:
    """A tiny model with 16 small experts, 4 per token, that learns in seconds on a CPU."""
    moe = MoEConfig(hidden_dim=64, num_experts=16, top_k=4, aux_loss="batch", z_loss_weight=1e-3)
    return debug_run(OLMoEConfig(dim=128, num_layers=3, num_kv_heads=4, head_dim=32, moe=moe))


def olmoe_7b_a1b() -> RunConfig[OLMoEConfig]:
    """16 layers of width 2048 with 64 experts, 8 per token."""
    model = OLMoEConfig(
        vocab_size=50_304,
        dim=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        moe=MoEConfig(hidden_dim=1024, num_experts=64, top_k=8, aux_loss="batch", z_loss_weight=1e-3),
    )
    return full_size_run(model, lr=4e-4)


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset for preset in (olmoe_debugmodel, olmoe_7b_a1b)
}
