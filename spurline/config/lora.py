"""The section of low-rank adapters."""

from __future__ import annotations

from dataclasses import dataclass

from spurline.config.checks import at_least


@dataclass(frozen=True)
class Lora:
    """LoRA: the weights of a base model stay as they are, and adapters of low rank are trained beside them."""

    rank: int = 0
    """Rank of the adapters (0: no adapters, the weights themselves are trained)."""
    alpha: float = 16.0
    """What an adapter adds is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("*.attention.*|*.feed_forward.*|*.experts.*|*.shared_experts.*",)
    """Patterns of the weights that get adapters: "*.attention.w[qv].weight" "*.experts.*" ..."""
    base: str = ""
    """Run folder of the base model; its weights are loaded, and checkpoints hold the adapters alone."""
    base_step: int = -1
    """Step of the base model's checkpoint (-1: the newest)."""

    def problems(self) -> list[str]:
        found = at_least(self, rank=0, base_step=-1)
        if self.rank > 0 and self.alpha <= 0:
            found.append(f"alpha must be positive, got {self.alpha}")
        if self.rank > 0 and not self.targets:
            found.append("targets must name at least one weight")
        if self.rank > 0 and not self.base:
            found.append("base is missing: give the run folder of the model to adapt")
        if self.rank == 0 and self.base:
            found.append("base needs rank above 0")
        return found
