"""Plans with empty places: those hold a sentinel, a row of zeros behind the tokens.

T tokens, A places in the order of experts, D width. Token number T is the sentinel: it is made for the journey, what
comes back for it is dropped, and so is its gradient.
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
    """What the counters call it."""
    num_empty: int
    """Places that hold the sentinel, at least: rows that are dropped leave more."""

    @counted(lambda plan, x_TD: {plan.path: 1, f"{plan.path}.padding_rows": plan.num_empty})
    def dispatch(self, x_TD: Tensor) -> Rows:
        rows = self.plan.dispatch(with_sentinel(x_TD))
        # A kernel that gathers rows by itself adds them onto the tokens too, and the layer's have no sentinel.
        return rows if rows.token_S is None else replace(rows, x=rows.tensor(), token_S=None)

    def combine(self, rows: Rows) -> Tensor:
        if rows.onto_TD is not None:
            rows = replace(rows, onto_TD=with_sentinel(rows.onto_TD), may_overwrite=True)
        return self.plan.combine(rows)[:-1]


def with_sentinel(x_TD: Tensor) -> Tensor:
    """(T, D) -> (T + 1, D)."""
    return torch.cat([x_TD, x_TD.new_zeros(1, x_TD.shape[1])])


def with_zero(weight_S: Tensor) -> Tensor:
    """(S,) -> (S + 1,): what the sentinel weighs."""
    return torch.cat([weight_S, weight_S.new_zeros(1)])
