"""How the next token is sampled. No torch import."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.8
    """Softmax temperature (0: greedy)."""
    top_k: int = 40
    """Sample only from the k most likely tokens (0: all)."""
    top_p: float = 1.0
    """Nucleus sampling, after top_k: the smallest set of tokens with at least this total probability (1: off)."""

    def problems(self) -> list[str]:
        """All errors, one message each; empty if valid."""
        found = []
        if not 0 <= self.temperature < float("inf"):
            found.append(f"temperature must be a number from 0 on, got {self.temperature}")
        if self.top_k < 0:
            found.append(f"top_k must not be negative, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p must be above 0 and at most 1, got {self.top_p}")
        return found


GREEDY = Sampling(temperature=0)
