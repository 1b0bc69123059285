"""The interface of dispatch plans: where every row goes, and how it comes back.

T tokens, S rows that leave this rank's tokens, R rows that reach its experts, D width. A dispatcher turns a Routing
into a plan. All host work and every choice of a path happens there; a plan only moves data.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup

from spurline.moe.registry import register_dispatcher as register_dispatcher
from spurline.moe.routing import Routing
from spurline.moe.rows import Rows


class Plan(Protocol):
    def dispatch(self, x_TD: Tensor) -> Rows:
        """(T, D) -> the rows of this rank's experts: not gathered yet, or in flight (`Rows.arrival`)."""
        ...

    def combine(self, rows: Rows) -> Tensor:
        """The experts' output rows -> (T, D): the mirror of dispatch, added to `rows.onto_TD`.

        A kernel may have combined already (`rows.is_combined`), but only if dispatch did not gather the rows.
        """
        ...


class Dispatcher(Protocol):
    """Makes plans. The optional method across(ranks) -> Dispatcher returns its replacement for sharded experts."""

    def plan(self, routing: Routing, num_tokens_P: list[int] | None = None) -> Plan:
        """num_tokens_P: the number of tokens of each rank of the group, if they are known and may differ."""
        ...


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that the experts of a layer are sharded over."""

    group: ProcessGroup
    """Its ranks hold experts in order; with parts, the ranks of one expert's parts are neighbors."""
    layer: str = "moe"
    """The layer's name, for errors."""
    parts_per_expert: int = 1
    """Number of parts that the hidden width of an expert is split into, each on its own rank."""
    same_num_tokens: bool = True
    """Whether every rank has the same number of tokens, unless `plan` gets num_tokens_P."""


def spread_over(ranks: ExpertRanks, dispatcher: Dispatcher, name: str) -> Dispatcher:
    """The replacement of a layer's dispatcher, configured as `name`, when its experts are sharded over ranks."""
    across = getattr(dispatcher, "across", None)
    if across is None:
        raise ValueError(
            f"dispatcher {name!r} keeps rows on one rank, but experts are to be sharded over {ranks.group.size()}:"
            f" give {type(dispatcher).__name__} a method across(ranks), or choose another dispatcher"
        )
    return across(ranks)
