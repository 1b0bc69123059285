"""The section for low-rank adapters (LoRA)."""

from __future__ import annotations

from dataclasses import dataclass

from spurline.config.checks import at_least


@dataclass(frozen=True)
class Lora:
    """LoRA: the weights of a base model are frozen, and low-rank adapters are trained beside them."""

    rank: int = 0
    """Rank of the adapters (0: no adapters; all weights are trained)."""
    alpha: float = 16.0
    """Scaling: an adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*.attention.*|*.feed_forward.*|*.experts.*|*.shared_experts.*",)
    """Name patterns of the weights that get adapters: "*.attention.w[qv].weight" "*.experts.*" ..."""
    base: str = ""
    """Folder with the weights of the base model: of Hugging Face, a run's, or one checkpoint; the run's own checkpoints
    hold only the adapters. Without --module and --config, the model is that of the folder."""
    base_step: int = -1
    """Step of the base run's checkpoint (-1: the newest)."""

    def problems(self) -> list[str]:
        found = at_least(self, rank=0, base_step=-1)
        if self.rank > 0 and self.alpha <= 0:
            found.append(f"alpha must be positive, got {self.alpha}")
        if self.rank > 0 and not self.targets:
            found.append("targets must name at least one weight")
        if self.rank > 0 and not self.base:
            found.append("base is missing: give the folder of the model to adapt, of a run or of Hugging Face")
        if self.rank == 0 and self.base:
            found.append("base needs rank above 0")
        return found
