"""How the next token of a text is drawn. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.8
    """How freely tokens are drawn (0: always the likeliest one)."""
    top_k: int = 40
    """Draw from this many of the likeliest tokens only (0: from all)."""
    top_p: float = 1.0
    """And of those from the fewest whose probabilities add up to this."""

    def problems(self) -> list[str]:
        """Everything that is wrong, one sentence each; empty when it is sound."""
        found = []
        if not 0 <= self.temperature < float("inf"):
            found.append(f"temperature must be a number from 0 on, got {self.temperature}")
        if self.top_k < 0:
            found.append(f"top_k must not be negative, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            found.append(f"top_p must be above 0 and at most 1, got {self.top_p}")
        return found


GREEDY = Sampling(temperature=0)
