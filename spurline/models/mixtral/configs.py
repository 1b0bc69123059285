"""The configs and presets of Mistral and Mixtral. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spurline.config import RunConfig
from spurline.models.common.decoder_config import AttentionFeatures, GroupedQueryConfig, SparseDecoderConfig
from spurline.models.common.presets import debug_run, full_size_run, spread_experts
from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.models.mixtral.model import Mixtral


@dataclass(frozen=True)
class MistralConfig(GroupedQueryConfig):
    """Grouped-query attention with an optional sliding window."""

    sliding_window: int = 0
    """How many positions a query sees, including its own (0: all before it)."""

    def problems(self) -> list[str]:
        found = super().problems()
        if self.sliding_window < 0:
            found.append(f"sliding_window must not be negative, got {self.sliding_window}")
        return found

    def build(self) -> Mixtral:
        from spurline.models.mixtral.model import Mixtral

        return Mixtral(self)

    def attention_features(self, layer: int) -> AttentionFeatures:
        return AttentionFeatures(window=self.sliding_window)


@dataclass(frozen=True)
class MixtralConfig(SparseDecoderConfig, MistralConfig):
    """Mistral with experts."""


def mistral_debugmodel() -> RunConfig[MistralConfig]:
    """A tiny dense model with a sliding window that learns in seconds on a CPU."""
    return debug_run(MistralConfig(dim=128, num_layers=3, dense_hidden_dim=384, head_dim=32, sliding_window=32))


def mixtral_debugmodel() -> RunConfig[MixtralConfig]:
    """A tiny model with 8 experts, 2 per token, that learns in seconds on a CPU."""
    moe = MoEConfig(hidden_dim=192, num_experts=8, top_k=2, route_norm=True, aux_loss="batch")
    return debug_run(MixtralConfig(dim=128, num_layers=3, head_dim=32, moe=moe))


def mistral_7b() -> RunConfig[MistralConfig]:
    """Mistral 7B v0.1: 32 layers of width 4096, a window of 4096."""
    model = MistralConfig(
        vocab_size=32_000,
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        dense_hidden_dim=14_336,
        sliding_window=4096,
    )
    return full_size_run(model, lr=3e-4)


def _sparse(lr: float, dim: int, num_layers: int, num_heads: int, expert_hidden_dim: int) -> RunConfig[MixtralConfig]:
    moe = MoEConfig(
        hidden_dim=expert_hidden_dim,
        num_experts=8,
        top_k=2,
        route_norm=True,
        aux_loss="batch",
        aux_loss_weight=1e-3,
    )
    model = MixtralConfig(
        vocab_size=32_000,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        moe=moe,
    )
    return full_size_run(model, lr)


def mixtral_8x7b() -> RunConfig[MixtralConfig]:
    """32 layers of width 4096 with 8 experts, 2 per token."""
    return _sparse(3e-4, dim=4096, num_layers=32, num_heads=32, expert_hidden_dim=14_336)


def mixtral_8x22b() -> RunConfig[MixtralConfig]:
    """56 layers of width 6144 with 8 experts, 2 per token."""
    return spread_experts(_sparse(2e-4, dim=6144, num_layers=56, num_heads=48, expert_hidden_dim=16_384), 8)


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset
    for preset in (mistral_debugmodel, mixtral_debugmodel, mistral_7b, mixtral_8x7b, mixtral_8x22b)
}
