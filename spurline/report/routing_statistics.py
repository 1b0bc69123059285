"""Statistics of which experts fire on which text. Torch-free.

N sequences of L tokens, T = N * L, K experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Visits:
    """The tokens of a text, and the expert ids and weights of each token in each layer."""

    tokens_NL: Array
    ids: dict[str, Array]
    """(T, K) by layer."""
    weights: dict[str, Array]
    num_experts: dict[str, int]


@dataclass(frozen=True)
class Context:
    """A position in the text: the token at `position` of sequence `sequence`, and its routing weight."""

    sequence: int
    position: int
    weight: float


@dataclass(frozen=True)
class ExpertStatistics:
    share: float
    """Fraction of all visits in the layer."""
    mean_weight: float
    tokens: list[tuple[int, int, float]]
    """Tokens routed here more often than average: id, visits, and fraction of the token's occurrences."""
    contexts: list[Context]
    """Where its weight is highest, one per distinct token."""


@dataclass(frozen=True)
class LayerStatistics:
    experts: list[ExpertStatistics]
    together_EE: Array
    """How often two experts are visited by the same token, relative to independent routing with the same loads."""

    @property
    def dead(self) -> int:
        return sum(expert.share == 0 for expert in self.experts)

    @property
    def busiest(self) -> float:
        """Load of the busiest expert relative to the mean."""
        return max(expert.share for expert in self.experts) * len(self.experts)


def layer_statistics(visits: Visits, layer: str, num_tokens: int = 8, num_contexts: int = 3) -> LayerStatistics:
    ids_TK, weights_TK, num_experts = visits.ids[layer], visits.weights[layer], visits.num_experts[layer]
    token_T = visits.tokens_NL.reshape(-1)
    load_E = np.bincount(ids_TK.ravel(), minlength=num_experts)
    weight_E = np.bincount(ids_TK.ravel(), weights_TK.ravel(), minlength=num_experts)
    token_S = np.repeat(token_T, ids_TK.shape[1])
    times_of_token = np.bincount(token_T)
    experts = []
    for expert in range(num_experts):
        mine_S = ids_TK.ravel() == expert
        share = float(load_E[expert] / max(1, ids_TK.size))
        experts.append(
            ExpertStatistics(
                share,
                float(weight_E[expert] / max(1, load_E[expert])),
                _typical_tokens(token_S[mine_S], times_of_token, share * ids_TK.shape[1], num_tokens),
                _strongest(visits.tokens_NL, ids_TK == expert, weights_TK, num_contexts),
            )
        )
    return LayerStatistics(experts, _together(ids_TK, load_E))


def _typical_tokens(token_s: Array, times_of_token: Array, rate: float, count: int) -> list[tuple[int, int, float]]:
    """The tokens whose visits most exceed the average rate, as in `ExpertStatistics.tokens`."""
    token, number = np.unique(token_s, return_counts=True)
    excess = number - rate * times_of_token[token]
    order = np.argsort(-excess, kind="stable")[:count]
    return [
        (int(token[i]), int(number[i]), float(number[i] / times_of_token[token[i]])) for i in order if excess[i] > 0
    ]


def _strongest(tokens_NL: Array, mine_TK: Array, weights_TK: Array, count: int) -> list[Context]:
    weight_T = np.where(mine_TK, weights_TK, -1.0).max(1)
    found: list[Context] = []
    shown: set[int] = set()
    length = tokens_NL.shape[1]
    for place in np.argsort(-weight_T, kind="stable")[: 50 * count]:
        token = int(tokens_NL.flat[place])
        if weight_T[place] < 0 or len(found) == count:
            break
        if token not in shown:
            shown.add(token)
            found.append(Context(int(place) // length, int(place) % length, float(weight_T[place])))
    return found


def _together(ids_TK: Array, load_E: Array) -> Array:
    """(E, E): observed pairs over pairs expected if experts were drawn independently by load; 0 on the diagonal."""
    num_tokens, num_slots = ids_TK.shape
    num_experts = len(load_E)
    pairs_EE = np.zeros((num_experts, num_experts))
    for first in range(num_slots):
        for second in range(num_slots):
            if first != second:
                np.add.at(pairs_EE, (ids_TK[:, first], ids_TK[:, second]), 1)
    share_E = load_E / max(1, num_tokens * num_slots)
    expected_EE = np.outer(share_E, share_E) * num_tokens * num_slots * (num_slots - 1)
    np.fill_diagonal(pairs_EE, 0)
    return np.divide(pairs_EE, expected_EE, out=np.zeros_like(pairs_EE), where=expected_EE > 0)
