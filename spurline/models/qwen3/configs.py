"""The Qwen3 family's configs and presets. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spurline.config import RunConfig
from spurline.models.common.decoder_config import AttentionFeatures, GroupedQueryConfig, SparseDecoderConfig
from spurline.models.common.presets import debug_run, full_size_run, spread_experts
from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.models.qwen3.model import Qwen3


@dataclass(frozen=True)
class Qwen3Config(GroupedQueryConfig):
    """Grouped-query attention with normalized queries and keys."""

    def build(self) -> Qwen3:
        from spurline.models.qwen3.model import Qwen3

        return Qwen3(self)

    def attention_features(self, layer: int) -> AttentionFeatures:
        return AttentionFeatures(qk_norm="head")


@dataclass(frozen=True)
class Qwen3MoEConfig(SparseDecoderConfig, Qwen3Config):
    """Qwen3 with experts."""


def qwen3_debugmodel() -> RunConfig[Qwen3Config]:
    """A tiny dense model with tied embeddings that learns in seconds on a CPU."""
    return debug_run(Qwen3Config(dim=128, num_layers=3, dense_hidden_dim=384, head_dim=48, tied_embeddings=True))


def qwen3_debugmodel_moe() -> RunConfig[Qwen3MoEConfig]:
    """A tiny model with 8 experts, 2 per token, that learns in seconds on a CPU."""
    moe = MoEConfig(hidden_dim=96, num_experts=8, top_k=2, route_norm=True, aux_loss="batch")
    return debug_run(Qwen3MoEConfig(dim=128, num_layers=3, head_dim=48, moe=moe))


_PUBLISHED: dict[str, Any] = {"vocab_size": 151_936, "head_dim": 128, "rope_theta": 1e6, "norm_eps": 1e-6}


def _dense(
    lr: float, dim: int, num_layers: int, num_heads: int, dense_hidden_dim: int, tied_embeddings: bool = False
) -> RunConfig[Qwen3Config]:
    model = Qwen3Config(
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=8,
        dense_hidden_dim=dense_hidden_dim,
        tied_embeddings=tied_embeddings,
        **_PUBLISHED,
    )
    return full_size_run(model, lr)


def _sparse(lr: float, dim: int, num_layers: int, num_heads: int, expert_hidden_dim: int) -> RunConfig[Qwen3MoEConfig]:
    moe = MoEConfig(
        hidden_dim=expert_hidden_dim,
        num_experts=128,
        top_k=8,
        route_norm=True,
        aux_loss="batch",
        aux_loss_weight=1e-3,
    )
    model = Qwen3MoEConfig(dim=dim, num_layers=num_layers, num_heads=num_heads, num_kv_heads=4, moe=moe, **_PUBLISHED)
    return full_size_run(model, lr)


def qwen3_0_6b() -> RunConfig[Qwen3Config]:
    """Dense, 28 layers of width 1024, tied embeddings."""
    return _dense(6e-4, dim=1024, num_layers=28, num_heads=16, dense_hidden_dim=3072, tied_embeddings=True)


def qwen3_1_7b() -> RunConfig[Qwen3Config]:
    """Dense, 28 layers of width 2048, tied embeddings."""
    return _dense(4e-4, dim=2048, num_layers=28, num_heads=16, dense_hidden_dim=6144, tied_embeddings=True)


def qwen3_4b() -> RunConfig[Qwen3Config]:
    """Dense, 36 layers of width 2560, tied embeddings."""
    return _dense(3e-4, dim=2560, num_layers=36, num_heads=32, dense_hidden_dim=9728, tied_embeddings=True)


def qwen3_8b() -> RunConfig[Qwen3Config]:
    """Dense, 36 layers of width 4096."""
    return _dense(3e-4, dim=4096, num_layers=36, num_heads=32, dense_hidden_dim=12_288)


def qwen3_14b() -> RunConfig[Qwen3Config]:
    """Dense, 40 layers of width 5120."""
    return _dense(2e-4, dim=5120, num_layers=40, num_heads=40, dense_hidden_dim=17_408)


def qwen3_32b() -> RunConfig[Qwen3Config]:
    """Dense, 64 layers of width 5120."""
    return _dense(1.5e-4, dim=5120, num_layers=64, num_heads=64, dense_hidden_dim=25_600)


def qwen3_30b_a3b() -> RunConfig[Qwen3MoEConfig]:
    """48 layers of width 2048 with 128 experts, 8 per token."""
    return _sparse(3e-4, dim=2048, num_layers=48, num_heads=32, expert_hidden_dim=768)


def qwen3_235b_a22b() -> RunConfig[Qwen3MoEConfig]:
    """94 layers of width 4096 with 128 experts, 8 per token."""
    run = _sparse(2e-4, dim=4096, num_layers=94, num_heads=64, expert_hidden_dim=1536)
    return spread_experts(run, 16, resend_rows=True)


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset
    for preset in (
        qwen3_debugmodel,
        qwen3_debugmodel_moe,
        qwen3_0_6b,
        qwen3_1_7b,
        qwen3_4b,
        qwen3_8b,
        qwen3_14b,
        qwen3_32b,
        qwen3_30b_a3b,
        qwen3_235b_a22b,
    )
}
