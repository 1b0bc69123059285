"""Which experts the tokens of a rank visit: balanced, by Zipf's law, or as a run's metrics have it. Free of torch.

The ranks of a layer wait for the one with most rows, so the simulated rank is that one: the experts of a layer are put
in such an order that its first ranks have the most.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class RoutingModel:
    """The share of rows of each expert: `shares[layer]`, or the same for every layer under ""."""

    name: str = "balanced"
    shares: dict[str, list[float]] = field(default_factory=dict)

    def counts(self, layer: str, num_tokens: int, top_k: int, num_experts: int, num_ranks: int) -> list[int]:
        """Rows of each expert from one rank's tokens, hottest rank first; no expert gets more than one a token."""
        shares = self.shares.get(layer) or self.shares.get("") or [1.0] * num_experts
        if len(shares) != num_experts:
            raise ValueError(f"routing {self.name}: {layer} has {len(shares)} experts there and {num_experts} here")
        counts = counts_of_shares(hottest_first(shares, num_ranks), num_tokens, top_k)
        if counts[0] == counts[-1] and 0 < counts[0] < num_tokens:
            # No router is so even that the paths for equal counts could be taken.
            counts[0], counts[1] = counts[0] + 1, counts[1] - 1
        return counts


def balanced() -> RoutingModel:
    return RoutingModel()


def zipf(exponent: float, num_experts: int) -> RoutingModel:
    """Expert number i of a random order gets a share in proportion to 1 / i**exponent."""
    shares = [1 / (i + 1) ** exponent for i in range(num_experts)]
    random.Random(0).shuffle(shares)
    return RoutingModel(f"zipf {exponent:g}", {"": shares})


def measured(path: str | Path) -> RoutingModel:
    """The mean load of each expert over the last tenth of a run's metrics.jsonl; a ValueError if there is none."""
    path = Path(path)
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"--routing {path}: {error.strerror}") from None
    try:
        records = [json.loads(line) for line in lines if line.strip()]
        loads = [record["expert_load"] for record in records if record.get("expert_load")]
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"--routing {path}: is not a run's metrics.jsonl") from None
    if not loads:
        raise ValueError(f"--routing {path}: no expert_load in it: it has to come from a run of a model with experts")
    last = loads[-max(1, len(loads) // 10) :]
    shares = {layer: [sum(column) for column in zip(*(load[layer] for load in last), strict=True)] for layer in last[0]}
    return RoutingModel(f"measured in {path}", shares)


def hottest_first(shares: Sequence[float], num_ranks: int) -> list[float]:
    """The experts in the order of the ranks that hold them, with the ranks sorted by load."""
    size = max(1, len(shares) // num_ranks)
    ranks = [list(shares[start : start + size]) for start in range(0, len(shares), size)]
    return [share for rank in sorted(ranks, key=sum, reverse=True) for share in rank]


def counts_of_shares(shares: Sequence[float], num_tokens: int, top_k: int) -> list[int]:
    """Whole numbers in proportion to shares that add up to num_tokens * top_k, none above num_tokens."""
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
