"""The gpt-oss family's config and presets. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spurline.config import RunConfig
from spurline.models.common.decoder_config import (
    AttentionFeatures,
    GroupedQueryConfig,
    SparseDecoderConfig,
    YarnConfig,
    not_positive,
)
from spurline.models.common.presets import debug_run, full_size_run, spread_experts
from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.models.gpt_oss.model import GptOss


def _moe(**sizes: Any) -> MoEConfig:
    return MoEConfig(experts="clamped_swiglu", gate_bias=True, route_norm=True, aux_loss="batch", **sizes)


@dataclass(frozen=True)
class GptOssConfig(SparseDecoderConfig, GroupedQueryConfig):
    """Attention with sinks and biases, and a sliding window in every second layer, starting with the first."""

    sliding_window: int = 128
    """Positions that a query sees in layers 0, 2, 4, ..., including its own; in other layers it sees all before it."""
    moe: MoEConfig = field(default_factory=_moe)

    def problems(self) -> list[str]:
        return super().problems() + not_positive(self, "sliding_window")

    def build(self) -> GptOss:
        from spurline.models.gpt_oss.model import GptOss

        return GptOss(self)

    def attention_features(self, layer: int) -> AttentionFeatures:
        window = 0 if layer % 2 else self.sliding_window
        return AttentionFeatures(qkv_bias=True, output_bias=True, sinks=True, window=window)


def gpt_oss_debugmodel() -> RunConfig[GptOssConfig]:
    """A tiny model with 8 experts, 2 per token, that learns in seconds on a CPU."""
    moe = _moe(hidden_dim=96, num_experts=8, top_k=2)
    return debug_run(GptOssConfig(dim=128, num_layers=4, head_dim=32, sliding_window=32, moe=moe))


def _published(lr: float, num_layers: int, num_experts: int) -> RunConfig[GptOssConfig]:
    model = GptOssConfig(
        vocab_size=201_088,
        dim=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        rope_theta=150_000.0,
        # For sequences of up to 32 x 4096 tokens; training from scratch does not need it (factor 1).
        yarn=YarnConfig(factor=32.0, truncate=False),
        moe=_moe(hidden_dim=2880, num_experts=num_experts, top_k=4, aux_loss_weight=1e-3),
    )
    return full_size_run(model, lr)


def gpt_oss_20b() -> RunConfig[GptOssConfig]:
    """24 layers of width 2880 with 32 experts, 4 per token."""
    return _published(3e-4, num_layers=24, num_experts=32)


def gpt_oss_120b() -> RunConfig[GptOssConfig]:
    """36 layers of width 2880 with 128 experts, 4 per token."""
    return spread_experts(_published(2e-4, num_layers=36, num_experts=128), 8)


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset for preset in (gpt_oss_debugmodel, gpt_oss_20b, gpt_oss_120b)
}
