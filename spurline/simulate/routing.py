"""The experts that a rank's tokens visit: balanced, by Zipf's law, or by given shares. Without torch or NumPy.

The ranks of a layer wait for the one with the most rows, so that one is simulated: the experts of a layer are ordered
such that the first ranks have the most rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RoutingModel:
    """The share of rows of each expert: `shares[layer]`, or the same for every layer under ""; balanced if empty."""

    name: str = "balanced"
    shares: dict[str, list[float]] = field(default_factory=dict)

    def counts(self, layer: str, num_tokens: int, top_k: int, num_experts: int, num_ranks: int) -> list[int]:
        """Rows per expert from one rank's tokens, hottest rank first; a token visits an expert at most once."""
        shares = self.shares.get(layer, self.shares.get("")) if self.shares else [1.0] * num_experts
        if shares is None:
            known = list(self.shares)
            those = ", ".join(known) if len(known) < 4 else f"{known[0]} to {known[-1]}"
            raise ValueError(f"routing {self.name}: no {layer} there, only {those}: take a run of this model")
        if len(shares) != num_experts:
            raise ValueError(f"routing {self.name}: {layer} has {len(shares)} experts there and {num_experts} here")
        counts = counts_of_shares(hottest_first(shares, num_ranks), num_tokens, top_k)
        if counts[0] == counts[-1] and 0 < counts[0] < num_tokens:
            # No real router is exactly even, so don't trigger the code paths for equal counts.
            counts[0], counts[1] = counts[0] + 1, counts[1] - 1
        return counts


def balanced() -> RoutingModel:
    return RoutingModel()


def zipf(exponent: float, num_experts: int) -> RoutingModel:
    """In a random order, expert i (from 1) gets a share proportional to 1 / i**exponent."""
    shares = [(i + 1) ** -exponent for i in range(num_experts)]  # which underflows to 0, while a power may overflow
    random.Random(0).shuffle(shares)
    return RoutingModel(f"zipf {exponent:g}", {"": shares})


def hottest_first(shares: Sequence[float], num_ranks: int) -> list[float]:
    """The shares of experts, grouped by rank, with the ranks sorted by load."""
    size = max(1, len(shares) // num_ranks)
    ranks = [list(shares[start : start + size]) for start in range(0, len(shares), size)]
    return [share for rank in sorted(ranks, key=sum, reverse=True) for share in rank]


def counts_of_shares(shares: Sequence[float], num_tokens: int, top_k: int) -> list[int]:
    """Integers proportional to shares that sum to num_tokens * top_k, none above num_tokens."""
    counts, open_experts, left = [0] * len(shares), set(range(len(shares))), num_tokens * top_k
    while left:
        total = sum(shares[i] for i in open_experts)
        wanted = {i: left * shares[i] / total if total else left / len(open_experts) for i in open_experts}
        full = [i for i in open_experts if wanted[i] >= num_tokens]
        for i in full:
            counts[i] = num_tokens
        open_experts -= set(full)
        left -= num_tokens * len(full)
        if not full:
            counts = [int(wanted[i]) if i in open_experts else count for i, count in enumerate(counts)]
            rest = left - sum(counts[i] for i in open_experts)
            for i in sorted(open_experts, key=lambda i: (-shares[i], i))[:rest]:
                counts[i] += 1
            break
    return counts
