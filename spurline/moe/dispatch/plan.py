"""What a dispatcher is: it turns a Routing into a plan, and a plan moves rows to their experts and back.

All host work and every choice of a path happens while the plan is made; after that, data only flows.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from spurline.moe.config import MoEConfig
from spurline.moe.router import Routing


class Plan(Protocol):
    @property
    def rows_per_expert(self) -> Tensor | list[int]:
        """Rows of each expert on this rank, (e,): host integers where they are known, else a device tensor."""
        ...

    def dispatch(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (R, D): the rows of this rank's experts, expert after expert."""
        ...

    def combine(self, rows_RD: Tensor, onto_TD: Tensor | None = None, keep: Iterable[Tensor] = ()) -> Tensor:
        """(R, D) -> (T, D): the mirror of dispatch, added onto onto_TD; it may reuse onto_TD, but nothing in `keep`."""
        ...


class Dispatcher(Protocol):
    def plan(self, routing: Routing) -> Plan: ...


_DISPATCHERS: dict[str, Callable[[MoEConfig], Dispatcher]] = {}


def register_dispatcher(name: str, make: Callable[[MoEConfig], Dispatcher]) -> None:
    """Make a dispatcher of your own known as MoEConfig.dispatcher = name."""
    _DISPATCHERS[name] = make


def make_dispatcher(config: MoEConfig) -> Dispatcher:
    if config.dispatcher not in _DISPATCHERS:
        known = ", ".join(sorted(_DISPATCHERS))
        raise ValueError(f"dispatcher {config.dispatcher!r} is not known; registered are: {known}")
    return _DISPATCHERS[config.dispatcher](config)
