"""The configs and presets of Qwen2, dense and with experts. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spurline.config import RunConfig
from spurline.models.common.decoder_config import AttentionFeatures, GroupedQueryConfig, SparseDecoderConfig
from spurline.models.common.presets import debug_run, full_size_run
from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.models.qwen2_moe.model import Qwen2


@dataclass(frozen=True)
class Qwen2Config(GroupedQueryConfig):
    """Grouped-query attention with QKV biases."""

    qkv_bias: bool = True
    """Biases in the query, key and value projections."""

    def build(self) -> Qwen2:
        from spurline.models.qwen2_moe.model import Qwen2

        return Qwen2(self)

    def attention_features(self, layer: int) -> AttentionFeatures:
        return AttentionFeatures(qkv_bias=self.qkv_bias)


@dataclass(frozen=True)
class Qwen2MoEConfig(SparseDecoderConfig, Qwen2Config):
    """Qwen2 with experts, and shared experts weighted by a gate."""


def qwen2_debugmodel() -> RunConfig[Qwen2Config]:
    """A tiny dense model with tied embeddings that learns in seconds on a CPU."""
    return debug_run(Qwen2Config(dim=128, num_layers=3, dense_hidden_dim=384, head_dim=32, tied_embeddings=True))


def qwen2_moe_debugmodel() -> RunConfig[Qwen2MoEConfig]:
    """A tiny model with 8 experts, 2 per token, and a gated shared one, that learns in seconds on a CPU."""
    moe = MoEConfig(hidden_dim=96, num_experts=8, top_k=2, num_shared_experts=1, shared_gate=True, aux_loss="batch")
    return debug_run(Qwen2MoEConfig(dim=128, num_layers=3, head_dim=32, moe=moe))


_PUBLISHED: dict[str, Any] = {"rope_theta": 1e6, "norm_eps": 1e-6}


def _dense(
    lr: float,
    dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    dense_hidden_dim: int,
    vocab_size: int = 151_936,
    tied_embeddings: bool = True,
) -> RunConfig[Qwen2Config]:
    model = Qwen2Config(
        vocab_size=vocab_size,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim // num_heads,
        dense_hidden_dim=dense_hidden_dim,
        tied_embeddings=tied_embeddings,
        **_PUBLISHED,
    )
    return full_size_run(model, lr)


def _sparse(
    lr: float, dim: int, num_layers: int, num_heads: int, num_kv_heads: int, moe: MoEConfig
) -> RunConfig[Qwen2MoEConfig]:
    model = Qwen2MoEConfig(
        vocab_size=151_936,
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim // num_heads,
        moe=replace(moe, shared_gate=True, aux_loss="batch", aux_loss_weight=1e-3),
        **_PUBLISHED,
    )
    return full_size_run(model, lr)


def qwen2_0_5b() -> RunConfig[Qwen2Config]:
    """Dense, 24 layers of width 896, tied embeddings."""
    return _dense(6e-4, 896, 24, num_heads=14, num_kv_heads=2, dense_hidden_dim=4864)


def qwen2_1_5b() -> RunConfig[Qwen2Config]:
    """Dense, 28 layers of width 1536, tied embeddings."""
    return _dense(4e-4, 1536, 28, num_heads=12, num_kv_heads=2, dense_hidden_dim=8960)


def qwen2_7b() -> RunConfig[Qwen2Config]:
    """Dense, 28 layers of width 3584."""
    return _dense(
        3e-4, 3584, 28, num_heads=28, num_kv_heads=4, dense_hidden_dim=18_944, vocab_size=152_064, tied_embeddings=False
    )


def qwen1_5_moe_a2_7b() -> RunConfig[Qwen2MoEConfig]:
    """24 layers of width 2048 with 60 experts, 4 per token, and a gated shared one as wide as four."""
    moe = MoEConfig(hidden_dim=1408, num_experts=60, top_k=4, num_shared_experts=4)
    return _sparse(3e-4, 2048, 24, num_heads=16, num_kv_heads=16, moe=moe)


def qwen2_57b_a14b() -> RunConfig[Qwen2MoEConfig]:
    """28 layers of width 3584 with 64 experts, 8 per token, and a gated shared one as wide as eight."""
    moe = MoEConfig(hidden_dim=2560, num_experts=64, top_k=8, num_shared_experts=8)
    return _sparse(2e-4, 3584, 28, num_heads=28, num_kv_heads=4, moe=moe)


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset
    for preset in (
        qwen2_debugmodel,
        qwen2_moe_debugmodel,
        qwen2_0_5b,
        qwen2_1_5b,
        qwen2_7b,
        qwen1_5_moe_a2_7b,
        qwen2_57b_a14b,
    )
}
