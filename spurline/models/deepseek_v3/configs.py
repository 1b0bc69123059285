"""The DeepSeek-V3 family's config and presets. Free of torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from spurline.config import LRScheduler, Optimizer, RunConfig, Training
from spurline.moe.config import MoEConfig
from spurline.parallel.degrees import ParallelFacts

if TYPE_CHECKING:
    from spurline.models.deepseek_v3.model import DeepSeekV3

_POSITIVE = (
    "vocab_size",
    "dim",
    "num_layers",
    "dense_hidden_dim",
    "num_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rope_theta",
    "norm_eps",
)


@dataclass(frozen=True)
class DeepSeekV3Config:
    vocab_size: int = 264
    """Size of the vocabulary; the built-in byte tokenizer uses 257 entries."""
    dim: int = 256
    """Model width D."""
    num_layers: int = 4
    """Transformer blocks."""
    num_dense_layers: int = 1
    """The first blocks, which have a dense feed-forward instead of experts."""
    dense_hidden_dim: int = 512
    """Hidden width of the dense feed-forward."""
    num_heads: int = 4
    """Attention heads."""
    q_lora_rank: int = 0
    """Rank of the query projection (0 = one full matrix)."""
    kv_lora_rank: int = 64
    """Rank of the joint key and value latent."""
    qk_nope_head_dim: int = 32
    """Width of a head's query and key without position."""
    qk_rope_head_dim: int = 32
    """Width of a head's query and key with rotary position."""
    v_head_dim: int = 32
    """Width of a head's value."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added under the root of RMSNorm."""
    moe: MoEConfig = field(default_factory=MoEConfig)

    def problems(self) -> list[str]:
        found = [
            f"{name} must be positive, got {getattr(self, name)}" for name in _POSITIVE if getattr(self, name) <= 0
        ]
        if self.q_lora_rank < 0:
            found.append(f"q_lora_rank must not be negative, got {self.q_lora_rank}")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            found.append(
                f"num_dense_layers must be between 0 and num_layers {self.num_layers}, got {self.num_dense_layers}"
            )
        if self.qk_rope_head_dim % 2:
            found.append(f"qk_rope_head_dim must be even, got {self.qk_rope_head_dim}")
        if self.moe.dim not in (0, self.dim):
            found.append(f"moe.dim {self.moe.dim} differs from dim {self.dim}: leave it at 0 to follow the model")
        if self.num_dense_layers < self.num_layers:
            found += [f"moe.{problem}" for problem in self.layer_moe().problems() if not problem.startswith("dim ")]
        return found

    def layer_moe(self) -> MoEConfig:
        """The MoE layers' config, with the model's width filled in."""
        return replace(self.moe, dim=self.dim)

    def with_forced_balance(self) -> DeepSeekV3Config:
        return replace(self, moe=replace(self.moe, force_load_balance=True))

    def parallel_facts(self) -> ParallelFacts:
        has_experts = self.num_dense_layers < self.num_layers
        return ParallelFacts(
            num_heads=self.num_heads,
            split_widths=(
                ("vocab_size", self.vocab_size),
                *((("dense_hidden_dim", self.dense_hidden_dim),) if self.num_dense_layers else ()),
            ),
            num_experts=self.moe.num_experts if has_experts else 0,
            expert_hidden_dim=self.moe.hidden_dim,
        )

    def num_params(self) -> int:
        return self._params(self.layer_moe().num_params())

    def num_active_params(self) -> int:
        return self._params(self.layer_moe().num_active_params())

    def _params(self, moe_params: int) -> int:
        embedding_norm_output = (2 * self.vocab_size + 1) * self.dim
        blocks = self.num_layers * (self._attention_params() + 2 * self.dim)
        dense = self.num_dense_layers * 3 * self.dim * self.dense_hidden_dim
        moe = (self.num_layers - self.num_dense_layers) * moe_params
        return embedding_norm_output + blocks + dense + moe

    def _attention_params(self) -> int:
        qk_dim = self.qk_nope_head_dim + self.qk_rope_head_dim
        if self.q_lora_rank:
            query = self.q_lora_rank * (self.dim + 1 + self.num_heads * qk_dim)
        else:
            query = self.dim * self.num_heads * qk_dim
        latent = self.dim * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        key_value = self.kv_lora_rank * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + latent + key_value + self.num_heads * self.v_head_dim * self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward: six for each active matrix weight, plus causal attention."""
        matrices = self.num_active_params() - self.vocab_size * self.dim
        head_dims = self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
        attention = self.num_layers * self.num_heads * head_dims * seq_len
        return 6 * matrices + 3 * attention

    def build(self) -> DeepSeekV3:
        from spurline.models.deepseek_v3.model import DeepSeekV3

        return DeepSeekV3(self)


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


CONFIGS: dict[str, Callable[[], RunConfig[Any]]] = {
    "deepseek_v3_debugmodel": deepseek_v3_debugmodel,
}
