"""The DeepSeek family's config and presets, from V2-Lite to V3. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from spurline.config import Data, LRScheduler, Metrics, Optimizer, RunConfig, Training
from spurline.models.common.costs import Cost, dense_cost
from spurline.models.common.decoder_config import SparseDecoderConfig, YarnConfig, not_positive
from spurline.models.common.presets import full_size_run, spread_experts
from spurline.moe.config import MoEConfig

if TYPE_CHECKING:
    from spurline.models.deepseek_v3.model import DeepSeekV3


@dataclass(frozen=True)
class DeepSeekV3Config(SparseDecoderConfig):
    """Multi-head latent attention: keys and values of all heads come from one narrow latent per token."""

    norm_eps: float = 1e-6
    """Epsilon of RMSNorm."""
    num_dense_layers: int = 1
    """Number of first blocks with a dense feed-forward instead of an MoE layer."""
    q_lora_rank: int = 0
    """Rank of the query's low-rank projection (0 = one full matrix)."""
    kv_lora_rank: int = 64
    """Width of the joint key and value latent."""
    qk_nope_head_dim: int = 32
    """Width of a head's query and key without rotary position."""
    qk_rope_head_dim: int = 32
    """Width of a head's query and key with rotary position."""
    v_head_dim: int = 32
    """Width of a head's value."""
    num_mtp_layers: int = 0
    """Multi-token prediction modules, each of which predicts one token further during training (0 = off)."""
    mtp_loss_weight: float = 0.3
    """Weight of the mean of the prediction modules' losses."""

    def problems(self) -> list[str]:
        found = super().problems()
        found += not_positive(self, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        found += [
            f"{name} must not be negative, got {getattr(self, name)}"
            for name in ("q_lora_rank", "num_mtp_layers", "mtp_loss_weight")
            if getattr(self, name) < 0
        ]
        if self.qk_rope_head_dim % 2:
            found.append(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        return found

    def build(self) -> DeepSeekV3:
        from spurline.models.deepseek_v3.model import DeepSeekV3

        return DeepSeekV3(self)

    @property
    def rope_dim(self) -> int:
        return self.qk_rope_head_dim

    def _head_cost(self, seq_len: int) -> Cost:
        """A prediction module has a block like the last, a matrix, three norms, and uses the output matrix again."""
        block = self._layer_cost(self.num_layers - 1, seq_len)
        module = block + dense_cost(2 * self.dim**2 + 3 * self.dim) + Cost(0, 0, self._output_flops())
        return super()._head_cost(seq_len) + module * self.num_mtp_layers

    def _attention_params(self) -> int:
        qk_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.q_lora_rank:
            query = self.q_lora_rank * (self.dim + 1 + self.num_heads * qk_dim)
        else:
            query = self.dim * self.num_heads * qk_dim
        latent = self.dim * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        key_value = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + latent + key_value + self.num_heads * self.v_head_dim * self.dim

    def _key_and_value_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim


def deepseek_v3_debugmodel() -> RunConfig[DeepSeekV3Config]:
    """Learns to write something like Python in about a minute on two CPU cores."""
    return RunConfig(
        model=DeepSeekV3Config(
            q_lora_rank=96,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            moe=MoEConfig(
                hidden_dim=128,
                num_experts=8,
                top_k=2,
                num_shared_experts=1,
                score_func="sigmoid",
                route_norm=True,
                bias_update_rate=1e-2,
                aux_loss="sequence",
                aux_loss_weight=1e-2,
            ),
        ),
        training=Training(steps=600, seq_len=256, local_batch_size=4),
        optimizer=Optimizer(lr=2e-3),
        lr_scheduler=LRScheduler(warmup_steps=30, decay_ratio=0.5),
    )


def deepseek_v3_first() -> RunConfig[DeepSeekV3Config]:
    """What `make train` trains: the most that two CPU cores learn of Python in two minutes (docs/log.md says how)."""
    return RunConfig(
        model=DeepSeekV3Config(
            vocab_size=2048,
            dim=192,
            num_layers=2,
            num_dense_layers=0,
            num_heads=4,
            kv_lora_rank=64,
            # Queries and keys as wide as values: what PyTorch's fast attention on CPUs asks for.
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=32,
            moe=MoEConfig(
                hidden_dim=128,
                num_experts=8,
                top_k=2,
                num_shared_experts=1,
                score_func="sigmoid",
                route_norm=True,
                bias_update_rate=1e-2,
                aux_loss="sequence",
                aux_loss_weight=1e-2,
            ),
        ),
        # Many short sequences: so few steps learn more from different texts than from long contexts.
        training=Training(steps=600, seq_len=128, local_batch_size=16),
        optimizer=Optimizer(name="muon", lr=8e-3, groups=("embedding.* lr_factor=6",)),
        lr_scheduler=LRScheduler(warmup_steps=30, decay_ratio=0.9),
        data=Data(tokenizer="python_2048"),
        # All held-out text, and short samples: both take part of the two minutes.
        metrics=Metrics(validation_interval=200, validation_batches=30, sample_interval=200, sample_tokens=160),
    )


def _published(*, yarn_mscale: float, **fields: Any) -> DeepSeekV3Config:
    """The fields that DeepSeek's released models share."""
    return DeepSeekV3Config(
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        norm_eps=1e-6,
        # For sequences of up to 40 x 4096 tokens; training from scratch does not need it (factor 1).
        yarn=YarnConfig(factor=40.0, mscale=yarn_mscale, mscale_all_dim=yarn_mscale),
        **fields,
    )


def deepseek_v3_16b() -> RunConfig[DeepSeekV3Config]:
    """The size of DeepSeek-V2-Lite: 64 experts, 6 per token, softmax scores."""
    model = _published(
        vocab_size=102_400,
        dim=2048,
        num_layers=27,
        num_dense_layers=1,
        dense_hidden_dim=10_944,
        num_heads=16,
        yarn_mscale=0.707,
        moe=MoEConfig(
            hidden_dim=1408,
            num_experts=64,
            top_k=6,
            num_shared_experts=2,
            aux_loss="sequence",
            aux_loss_weight=1e-3,
        ),
    )
    return full_size_run(model, lr=4.2e-4)


def deepseek_v3_236b() -> RunConfig[DeepSeekV3Config]:
    """The size of DeepSeek-V2: 160 experts in 8 groups, 6 per token, softmax scores.

    A group is scored by its two best experts, as in V3; V2 itself took the best one.
    """
    model = _published(
        vocab_size=102_400,
        dim=5120,
        num_layers=60,
        num_dense_layers=1,
        dense_hidden_dim=12_288,
        num_heads=128,
        q_lora_rank=1536,
        yarn_mscale=0.707,
        moe=MoEConfig(
            hidden_dim=1536,
            num_experts=160,
            top_k=6,
            num_shared_experts=2,
            route_scale=16.0,
            num_groups=8,
            num_limited_groups=3,
            aux_loss="sequence",
            aux_loss_weight=3e-3,
        ),
    )
    return spread_experts(full_size_run(model, lr=2.4e-4), 16, resend_rows=True)


def deepseek_v3_671b() -> RunConfig[DeepSeekV3Config]:
    """DeepSeek-V3: 256 experts in 8 groups, 8 per token, sigmoid scores, balanced by bias."""
    model = _published(
        vocab_size=129_280,
        dim=7168,
        num_layers=61,
        num_dense_layers=3,
        dense_hidden_dim=18_432,
        num_heads=128,
        q_lora_rank=1536,
        yarn_mscale=1.0,
        moe=MoEConfig(
            hidden_dim=2048,
            num_experts=256,
            top_k=8,
            num_shared_experts=1,
            score_func="sigmoid",
            route_norm=True,
            route_scale=2.5,
            num_groups=8,
            num_limited_groups=4,
            bias_update_rate=1e-3,
            aux_loss="sequence",
            aux_loss_weight=1e-4,
        ),
    )
    return spread_experts(full_size_run(model, lr=2.2e-4), 64, resend_rows=True)


def kimi_k2() -> RunConfig[DeepSeekV3Config]:
    """Kimi K2: 384 experts, 8 per token, half as many heads as DeepSeek-V3 and one dense layer."""
    model = _published(
        vocab_size=163_840,
        dim=7168,
        num_layers=61,
        num_dense_layers=1,
        dense_hidden_dim=18_432,
        num_heads=64,
        q_lora_rank=1536,
        yarn_mscale=1.0,
        rope_theta=50_000.0,
        moe=MoEConfig(
            hidden_dim=2048,
            num_experts=384,
            top_k=8,
            num_shared_experts=1,
            score_func="sigmoid",
            route_norm=True,
            route_scale=2.827,
            bias_update_rate=1e-3,
            aux_loss="sequence",
            aux_loss_weight=1e-4,
        ),
    )
    model = replace(model, yarn=replace(model.yarn, factor=32.0, beta_fast=1.0))
    return spread_experts(full_size_run(model, lr=2e-4), 64, resend_rows=True)


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    preset.__name__: preset
    for preset in (
        deepseek_v3_first,
        deepseek_v3_debugmodel,
        deepseek_v3_16b,
        deepseek_v3_236b,
        deepseek_v3_671b,
        kimi_k2,
    )
}
