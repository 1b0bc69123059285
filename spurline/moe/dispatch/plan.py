"""What a plan is: where every row goes, and how it comes back.

T tokens, K experts per token, S = T*K rows that leave this rank's tokens, R rows that reach its experts, D width.
A dispatcher turns a Routing into a plan. All host work and every choice of a path happens there; after that, data only
flows.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.moe.dispatch.rows import sum_rows
from spurline.moe.registry import register_dispatcher as register_dispatcher
from spurline.moe.router import Routing
from spurline.moe.telemetry import count
from spurline.ops.rows import gather_rows


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


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that the experts of a layer are spread over."""

    group: ProcessGroup
    """They hold experts in order; with parts, the ranks of one expert's parts follow each other."""
    layer: str = "moe"
    """The layer's name, for errors."""
    parts_per_expert: int = 1
    """Into how many parts the hidden width of an expert is cut, each on a rank of its own."""
    same_num_tokens: bool = True
    """Whether every rank brings as many tokens, unless `plan` is told otherwise."""


class Dispatcher(Protocol):
    """Makes plans; one that also has across(ranks) -> Dispatcher says what takes its place across ranks."""

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        """num_tokens_P: the tokens of each rank of the group, where they are known to differ."""
        ...


def spread_over(ranks: ExpertRanks, dispatcher: Dispatcher, name: str) -> Dispatcher:
    """What takes the place of a layer's dispatcher, chosen as `name`, when its experts are spread over ranks."""
    across = getattr(dispatcher, "across", None)
    if across is None:
        raise ValueError(
            f"dispatcher {name!r} keeps rows on one rank, and experts are to be spread over {ranks.group.size()}:"
            f" give {type(dispatcher).__name__} a method across(ranks), or choose another dispatcher"
        )
    return across(ranks)
