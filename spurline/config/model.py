"""The interface between model configs and the trainer and tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ParallelFacts:
    """The sizes of a model that parallelism degrees must divide."""

    num_heads: int
    """Attention heads."""
    num_kv_heads: int | None = None
    """Key/value heads of grouped-query attention; None if every query head has its own."""
    num_experts: int = 0
    """Experts per MoE layer (0: a dense model)."""
    expert_hidden_dim: int = 0
    """Hidden width of one expert."""
    num_layers: int = 0
    """Layers to divide among pipeline stages (0: the model can't be split into stages)."""
    first_stage_layers: int = 1
    """Minimum number of layers in the first pipeline stage."""
    split_widths: tuple[tuple[str, int], ...] = ()
    """Other sizes that tensor parallelism splits, as (option name, size)."""


class ModelConfig(Protocol):
    """What the trainer and the tools require of a model family's config."""

    @property
    def vocab_size(self) -> int: ...

    def problems(self) -> list[str]: ...

    def num_params(self) -> int: ...

    def num_active_params(self) -> int: ...

    def flops_per_token(self, seq_len: int) -> int: ...

    def parallel_facts(self) -> ParallelFacts: ...

    def with_forced_balance(self) -> ModelConfig: ...

    def build(self) -> Any: ...
