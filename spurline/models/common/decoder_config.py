"""The configs that decoder families share: common fields, validation, parameter and FLOP counts. No torch import.

A family's config is a DecoderConfig with its attention's fields, and a SparseDecoderConfig if it has MoE layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from spurline.config import ParallelFacts
from spurline.models.common.costs import Cost, ModelCosts, dense_cost
from spurline.moe.config import MoEConfig


def not_positive(section: Any, *names: str) -> list[str]:
    """An error message for each of the named fields that is zero or negative."""
    return [f"{name} must be positive, got {getattr(section, name)}" for name in names if getattr(section, name) <= 0]


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension: low rotary frequencies are divided by the factor, high ones are kept."""

    factor: float = 1.0
    """Context extension relative to original_seq_len (1: off)."""
    original_seq_len: int = 4096
    """Sequence length of the original training."""
    beta_fast: float = 32.0
    """Pairs that rotate more often than this within original_seq_len keep their frequency."""
    beta_slow: float = 1.0
    """Pairs that rotate less often than this have their frequency divided by the full factor."""
    truncate: bool = True
    """Round the two boundaries to integer pair indices."""
    mscale: float = 1.0
    """Scales the rotary part of queries and keys by 1 + 0.1 * mscale * log(factor)."""
    mscale_all_dim: float = 0.0
    """The same for all channels, through the softmax scale; the rotary part is divided by it (0: off)."""

    def problems(self) -> list[str]:
        found = not_positive(self, "original_seq_len", "beta_slow")
        if self.factor < 1:
            found.append(f"factor must be at least 1, got {self.factor}")
        if self.beta_fast < self.beta_slow:
            found.append(f"beta_fast {self.beta_fast} must not be smaller than beta_slow {self.beta_slow}")
        found += [
            f"{name} must not be negative, got {getattr(self, name)}"
            for name in ("mscale", "mscale_all_dim")
            if getattr(self, name) < 0
        ]
        return found

    @property
    def rotated_scale(self) -> float:
        """Factor of the rotary part of queries and of keys."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def softmax_scale(self) -> float:
        """Factor of the softmax scale, on top of 1 / sqrt(head width)."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        return 1 + 0.1 * mscale * math.log(self.factor)


@dataclass(frozen=True)
class Llama3RopeConfig:
    """RoPE scaling of Llama 3.1: low rotary frequencies are divided by the factor, high ones are kept."""

    factor: float = 1.0
    """Divisor of the lowest frequencies (1: off)."""
    original_seq_len: int = 8192
    """Sequence length of the original training."""
    low_freq_factor: float = 1.0
    """Pairs that rotate less often than this within original_seq_len have their frequency divided by the factor."""
    high_freq_factor: float = 4.0
    """Pairs that rotate more often than this within original_seq_len keep their frequency."""

    def problems(self) -> list[str]:
        found = not_positive(self, "original_seq_len", "low_freq_factor")
        if self.factor < 1:
            found.append(f"factor must be at least 1, got {self.factor}")
        if self.high_freq_factor <= self.low_freq_factor:
            found.append(
                f"high_freq_factor {self.high_freq_factor} must be larger than low_freq_factor {self.low_freq_factor}"
            )
        return found


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int = 264
    """Size of the vocabulary; the built-in byte tokenizer uses 257 entries."""
    dim: int = 256
    """Model width D."""
    num_layers: int = 4
    """Number of transformer blocks."""
    dense_hidden_dim: int = 512
    """Hidden width of the dense feed-forward layers."""
    tied_embeddings: bool = False
    """Use the embedding matrix as the output matrix too."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    yarn: YarnConfig = field(default_factory=YarnConfig)
    llama3_rope: Llama3RopeConfig = field(default_factory=Llama3RopeConfig)
    norm_eps: float = 1e-5
    """Epsilon of RMSNorm."""
    num_heads: int = 4
    """Attention heads."""

    def problems(self) -> list[str]:
        """All errors of this config, one message each; empty if it is valid."""
        found = not_positive(self, "vocab_size", "dim", "num_layers", "num_heads", "norm_eps")
        if self._num_dense() > 0:
            found += not_positive(self, "dense_hidden_dim")
        if self.rope_theta <= 1:
            found.append(f"rope_theta must be larger than 1, got {self.rope_theta}")
        if self.yarn.factor > 1 and self.llama3_rope.factor > 1:
            found.append("yarn.factor and llama3_rope.factor are two ways to extend the context: leave one at 1")
        found += [f"yarn.{problem}" for problem in self.yarn.problems()]
        return found + [f"llama3_rope.{problem}" for problem in self.llama3_rope.problems()]

    def moe_of_layer(self, layer: int) -> MoEConfig | None:
        """The MoE layer of block number `layer`; None where the block has a dense feed-forward."""
        return None

    def with_forced_balance(self: D) -> D:
        """The same model with forced load balance in its MoE layers; a dense model is unchanged."""
        return self

    def parallel_facts(self) -> ParallelFacts:
        dense_hidden_dim = (("dense_hidden_dim", self.dense_hidden_dim),) if self._num_dense() else ()
        return ParallelFacts(
            num_heads=self.num_heads,
            num_layers=self.num_layers,
            split_widths=(("vocab_size", self.vocab_size), *dense_hidden_dim),
        )

    def num_params(self) -> int:
        """All parameters, embedding and output matrix included; tied ones are counted once."""
        return self.costs(seq_len=0).total().params

    def num_active_params(self) -> int:
        """Parameters used for one token in training: all but the experts that it isn't routed to."""
        return self.costs(seq_len=0).total().active_params

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward: six per active weight, without the embedding, plus causal attention."""
        return self.costs(seq_len).total().flops_per_token

    def costs(self, seq_len: int) -> ModelCosts:
        """Parameters and FLOPs of the embedding, each layer and the head; they add up to the model's."""
        layers = tuple(self._layer_cost(layer, seq_len) for layer in range(self.num_layers))
        return ModelCosts(self._embed_cost(), layers, self._head_cost(seq_len))

    def build(self) -> Any:
        """The model, as an nn.Module."""
        raise NotImplementedError

    @property
    def rope_dim(self) -> int:
        """Channels of a head that rotary position embedding rotates."""
        raise NotImplementedError

    def _num_dense(self) -> int:
        """How many blocks have a dense feed-forward."""
        return self.num_layers

    def _embed_cost(self) -> Cost:
        """The embedding's cost: a lookup has no FLOPs."""
        table = self.vocab_size * self.dim
        return Cost(table, table, 0)

    def _layer_cost(self, layer: int, seq_len: int) -> Cost:
        """Attention, feed-forward or experts, and two norms."""
        attention_flops = Cost(0, 0, self._attention_flops(layer, seq_len))
        attention = dense_cost(self._attention_params() + 2 * self.dim) + attention_flops
        moe = self.moe_of_layer(layer)
        if moe is None:
            return attention + dense_cost(3 * self.dim * self.dense_hidden_dim)
        active = moe.num_active_params()
        return attention + Cost(moe.num_params(), active, 6 * active)

    def _head_cost(self, seq_len: int) -> Cost:
        """The final norm, and the product with the output matrix; a tied one is counted with the embedding."""
        params = self.dim + (0 if self.tied_embeddings else self.vocab_size * self.dim)
        return Cost(params, params, 6 * self.dim + self._output_flops())

    def _output_flops(self) -> int:
        return 6 * self.vocab_size * self.dim

    def _attention_flops(self, layer: int, seq_len: int) -> int:
        """Forward and backward of one token's causal attention, without the projections."""
        return 3 * self.num_heads * self._key_and_value_dim() * seq_len

    def _attention_params(self) -> int:
        """The parameters of one layer's attention."""
        raise NotImplementedError

    def _key_and_value_dim(self) -> int:
        """The width of one head's key plus the width of its value."""
        raise NotImplementedError


D = TypeVar("D", bound=DecoderConfig)


def portable(config: D) -> D:
    """The same model as it computes on any machine and in any batch: no row is dropped, and no library is needed.

    For whatever reads the weights of a run. Its dispatcher and kernel are choices for the ranks that train it.
    """
    moe: MoEConfig | None = getattr(config, "moe", None)
    local = {} if moe is None else {"moe": replace(moe, dispatcher="local", experts_backend="auto")}
    return replace(config, **local)  # type: ignore[arg-type]


@dataclass(frozen=True)
class SparseDecoderConfig(DecoderConfig):
    """A decoder with dense blocks and blocks with MoE layers, in any pattern."""

    num_dense_layers: int = 0
    """Number of blocks at the start with a dense feed-forward instead of an MoE layer."""
    dense_layers: tuple[int, ...] = ()
    """Indices of further blocks with a dense feed-forward, such as 2,4,6 for every second one of eight."""
    moe: MoEConfig = field(default_factory=MoEConfig)

    def problems(self) -> list[str]:
        found = super().problems()
        if not 0 <= self.num_dense_layers <= self.num_layers:
            found.append(
                f"num_dense_layers must be between 0 and num_layers {self.num_layers}, got {self.num_dense_layers}"
            )
        further = list(self.dense_layers)
        if further != sorted({layer for layer in further if self.num_dense_layers <= layer < self.num_layers}):
            found.append(
                "dense_layers must be rising numbers of blocks behind the first num_dense_layers"
                f" {self.num_dense_layers} and below num_layers {self.num_layers}, got {further}"
            )
        if self.moe.dim not in (0, self.dim):
            found.append(f"moe.dim {self.moe.dim} differs from dim {self.dim}: leave it at 0 to follow the model")
        if self._num_moe() > 0:
            found += [f"moe.{problem}" for problem in self.layer_moe().problems() if not problem.startswith("dim ")]
        return found

    def layer_moe(self) -> MoEConfig:
        """The MoE layers' config, with the model's width filled in."""
        return replace(self.moe, dim=self.dim)

    def moe_of_layer(self, layer: int) -> MoEConfig | None:
        return None if layer < self.num_dense_layers or layer in self.dense_layers else self.layer_moe()

    def with_forced_balance(self: S) -> S:
        return replace(self, moe=replace(self.moe, force_load_balance=True))

    def parallel_facts(self) -> ParallelFacts:
        num_experts = self.moe.num_experts if self._num_moe() else 0
        return replace(super().parallel_facts(), num_experts=num_experts, expert_hidden_dim=self.moe.hidden_dim)

    def _num_dense(self) -> int:
        return self.num_dense_layers + len(self.dense_layers)

    def _num_moe(self) -> int:
        return self.num_layers - self._num_dense()


S = TypeVar("S", bound=SparseDecoderConfig)


@dataclass(frozen=True)
class AttentionFeatures:
    """Optional features of a layer's grouped-query attention."""

    qkv_bias: bool = False
    """Biases in the query, key and value projections."""
    output_bias: bool = False
    """A bias in the output projection."""
    qk_norm: Literal["none", "head", "all_heads"] = "none"
    """Normalize queries and keys: each head with one shared weight, or over the channels of all heads together."""
    window: int = 0
    """How many positions a query sees, including its own (0: all before it)."""
    sinks: bool = False
    """A learned logit in each head that takes part in the softmax but has no value."""


@dataclass(frozen=True)
class GroupedQueryConfig(DecoderConfig):
    """A decoder with grouped-query attention."""

    num_kv_heads: int = 2
    """Key/value heads; num_heads must be a multiple of it."""
    head_dim: int = 64
    """Width of a head."""

    def problems(self) -> list[str]:
        found = super().problems() + not_positive(self, "num_kv_heads", "head_dim")
        if self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads:
            found.append(f"num_kv_heads {self.num_kv_heads} does not divide num_heads {self.num_heads}")
        if self.rope_dim % 2:
            found.append(f"head_dim must have an even number of rotary channels, got {self.rope_dim}")
        return found

    def attention_features(self, layer: int) -> AttentionFeatures:
        """The attention features of block number `layer`; a family that uses any overrides it."""
        return AttentionFeatures()

    def parallel_facts(self) -> ParallelFacts:
        return replace(super().parallel_facts(), num_kv_heads=self.num_kv_heads)

    @property
    def rope_dim(self) -> int:
        return self.head_dim

    def _attention_flops(self, layer: int, seq_len: int) -> int:
        """A query of causal attention sees half of the positions, or its window."""
        window = self.attention_features(layer).window
        return super()._attention_flops(layer, min(seq_len, 2 * window) if window else seq_len)

    def _attention_params(self) -> int:
        features = self.attention_features(0)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = {"none": 0, "head": 2 * self.head_dim, "all_heads": queries + keys}[features.qk_norm]
        biases = features.qkv_bias * (queries + 2 * keys) + features.output_bias * self.dim
        return 2 * self.dim * (queries + keys) + norms + biases + features.sinks * self.num_heads

    def _key_and_value_dim(self) -> int:
        return 2 * self.head_dim
