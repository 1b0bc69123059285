"""Plans with empty places, which hold a sentinel: a row of zeros after the last token.

T tokens, A places sorted by expert, D width. Token number T is the sentinel: it is appended for dispatch, and its
output and gradient are dropped.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spurline.moe.dispatch.plan import Plan
from spurline.moe.rows import Rows
from spurline.moe.telemetry import counted


@dataclass(frozen=True)
class SentinelPlan:
    """A plan for T + 1 tokens, the last of which is the sentinel."""

    plan: Plan
    path: str
    """Its name in the counters."""
    num_empty: int
    """The least number of places that hold the sentinel: dropped rows leave more."""

    @counted(lambda plan, x_TD: {plan.path: 1, f"{plan.path}.padding_rows": plan.num_empty})
    def dispatch(self, x_TD: Tensor) -> Rows:
        rows = self.plan.dispatch(with_sentinel(x_TD))
        # A kernel that gathers rows by itself also adds them to the layer's tokens, which have no sentinel.
        return rows if rows.token_S is None else replace(rows, x=rows.tensor(), token_S=None)

    def combine(self, rows: Rows) -> Tensor:
        if rows.onto_TD is not None:
            rows = replace(rows, onto_TD=with_sentinel(rows.onto_TD), may_overwrite=True)
        return self.plan.combine(rows)[:-1]


def with_sentinel(x_TD: Tensor) -> Tensor:
    """(T, D) -> (T + 1, D)."""
    return torch.cat([x_TD, x_TD.new_zeros(1, x_TD.shape[1])])


def with_zero(weight_S: Tensor) -> Tensor:
    """(S,) -> (S + 1,): appends zero, the weight of the sentinel."""
    return torch.cat([weight_S, weight_S.new_zeros(1)])
