"""What a plan is: where every row goes, and how it comes back.

T tokens, K experts per token, S = T*K rows that leave this rank's tokens, R rows that reach its experts, D width.
A dispatcher turns a Routing into a plan. All host work and every choice of a path happens there; after that, data only
flows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.rows import sum_rows
from spurline.moe.ops.rows import gather_rows
from spurline.moe.router import Routing
from spurline.moe.telemetry import count


class Step(Protocol):
    """An invertible move of rows: an exchange between ranks, or a permutation on this one."""

    def forward(self, rows_RD: Tensor) -> Tensor: ...

    def inverse(self, rows_RD: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Plan:
    token_S: Tensor
    """The token of each row, in the order in which rows leave: expert after expert."""
    weight_S: Tensor
    """The weight of each row."""
    num_tokens: int
    score_before_experts: bool
    rows_per_expert: Tensor | list[int]
    """Rows of each expert on this rank, (e,): host integers where they are known, else a device tensor."""
    steps: tuple[Step, ...] = ()
    """What lies between leaving the tokens and reaching the experts; nothing on a single rank."""

    def dispatch(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (R, D): the rows of this rank's experts, expert after expert."""
        rows_RD = gather_rows(x_TD, self.token_S)
        if self.score_before_experts:
            rows_RD = self._weigh(rows_RD)
        for step in self.steps:
            rows_RD = step.forward(rows_RD)
        return rows_RD

    def combine(self, rows_RD: Tensor, onto_TD: Tensor | None = None, keep: Iterable[Tensor] = ()) -> Tensor:
        """(R, D) -> (T, D): the mirror of dispatch, added onto onto_TD; it may reuse onto_TD, but nothing in `keep`."""
        for step in reversed(self.steps):
            rows_RD = step.inverse(rows_RD)
        if not self.score_before_experts:
            rows_RD = self._weigh(rows_RD)
        return sum_rows(rows_RD, self.token_S, self.num_tokens, onto_TD, keep)

    def _weigh(self, rows_SD: Tensor) -> Tensor:
        self.count_weighing()
        return rows_SD * self.weight_S.to(rows_SD.dtype).unsqueeze(-1)

    def count_weighing(self) -> None:
        count("weigh.before_experts" if self.score_before_experts else "weigh.after_experts")


class Dispatcher(Protocol):
    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        """num_tokens_P: the tokens of each rank of the group, where they are known to differ."""
        ...


_DISPATCHERS: dict[str, Callable[[MoEConfig], Dispatcher]] = {}


def register_dispatcher(name: str, make: Callable[[MoEConfig], Dispatcher]) -> None:
    """Make a dispatcher of your own known as MoEConfig.dispatcher = name."""
    _DISPATCHERS[name] = make


def make_dispatcher(config: MoEConfig) -> Dispatcher:
    if config.dispatcher not in _DISPATCHERS:
        known = ", ".join(sorted(_DISPATCHERS))
        raise ValueError(f"dispatcher {config.dispatcher!r} is not known; registered are: {known}")
    return _DISPATCHERS[config.dispatcher](config)
