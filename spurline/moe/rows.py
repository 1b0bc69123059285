"""Rows: the input and output of experts.

T tokens of width D; R rows on this rank, sorted by its e experts. Rows may not be gathered from their tokens yet, may
be in flight from other ranks, or may have arrived: `tensor()` is the same in all three cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from spurline.moe.telemetry import counted
from spurline.ops.rows import gather_rows


@dataclass(frozen=True)
class RowCounts:
    """Rows per expert on this rank, in every form that is known without waiting for a device."""

    count_e: Tensor
    """(e,), int64; on the device, or on the host if it was computed there."""
    host_e: list[int] | None = None
    """The same as host integers; None if they are known only on the device, and while tracing."""
    group_range: tuple[int, int] | None = None
    """The fewest and the most rows of any expert in the group: the same on all ranks, so that all decide alike."""
    host_count_e: Tensor | None = None
    """A host copy of count_e, if count_e is on a device and a copy is available; while tracing, too."""

    @staticmethod
    def on_host(host_e: list[int]) -> RowCounts:
        return RowCounts(torch.tensor(host_e), host_e)

    def with_host_count(self) -> RowCounts:
        """With host_count_e, for kernels that need counts on the host: reads from the device only if it must."""
        if self.host_count_e is not None:
            return self
        known = (
            self.count_e.cpu()
            if self.host_e is None or self.count_e.device.type == "cpu"
            else torch.tensor(self.host_e)
        )
        return replace(self, host_count_e=known)


class Arrival(Protocol):
    """Rows in flight: `wait()` returns them, (R, D), sorted by expert; and their weights, if those were sent along.

    Weights that were sent along, (R,), are applied by the experts; others by the plan that kept them, in `combine`.
    """

    def wait(self) -> Tensor | tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Rows:
    """The input of experts and, by `output`, their output."""

    x: Tensor
    """The rows, (R, D); or with token_S the tokens, (T, D), that they are gathered from."""
    counts: RowCounts
    token_S: Tensor | None = None
    """The token of each row, while rows are not gathered yet: a kernel may then fuse gather and combine."""
    weight_S: Tensor | None = None
    """The routing weight of each row, if it is still to be applied."""
    weigh_before: bool = False
    """Whether weights multiply the inputs of the experts instead of their outputs."""
    arrival: Arrival | None = None
    """Set while rows are in flight; x is then what this rank sent."""
    onto_TD: Tensor | None = None
    """What the combined rows are added to: the output of the shared experts."""
    may_overwrite: bool = False
    """Whether nothing else holds onto_TD, so that rows may be added in place."""
    is_combined: bool = False
    """Whether x is already the layer's output, (T, D), from a kernel that combines by itself."""
    weigh_inside: bool = False
    """Whether weight_S is in the order of the experts' rows, so that experts may apply it."""
    start: Callable[[], Rows] | None = None
    """Set while the host does not know the split sizes: waits for them and starts the exchange."""
    on_arrival: Callable[[Tensor], Tensor] | None = None
    """A function that is applied to the rows when they arrive."""

    def started(self) -> Rows:
        """These rows in flight, with counts that the host knows."""
        if self.start is None:
            return self
        started, onto_TD, may_overwrite = self.start(), self.onto_TD, self.may_overwrite
        return replace(started, onto_TD=onto_TD, may_overwrite=may_overwrite, on_arrival=self.on_arrival)

    def arrived(self) -> Rows:
        """These rows after arrival: sorted by expert, with their weights if those were sent along."""
        if self.start is not None:
            return self.started().arrived()
        if self.arrival is None:
            return self
        arrived = self.arrival.wait()
        x_RD, weight_R = arrived if isinstance(arrived, tuple) else (arrived, None)
        rows = replace(self, x=x_RD if self.on_arrival is None else self.on_arrival(x_RD), arrival=None)
        return rows if weight_R is None else replace(rows, weight_S=weight_R, weigh_inside=True)

    def through(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """These rows, with `function` applied to them as soon as they arrive."""
        if self.start is None and self.arrival is None:
            return replace(self, x=function(self.x))
        return replace(self, on_arrival=function)

    def tensor(self) -> Tensor:
        """(R, D): gathered from the tokens or received from other ranks, ready to be multiplied."""
        if self.arrival is not None or self.start is not None:
            return self.arrived().x
        if self.token_S is None:
            return self.x
        rows_RD = gather_rows(self.x, self.token_S)
        return self.weigh(rows_RD) if self.weigh_before else rows_RD

    def output(self, y_RD: Tensor, is_weighed: bool = False) -> Rows:
        """The experts' output for these rows: (R, D), in the same order; is_weighed if weights are applied already."""
        return replace(self, x=y_RD, arrival=None, weight_S=None if is_weighed else self.weight_S)

    def weight_to_apply(self) -> Tensor | None:
        """(R,): weights that experts apply to their hidden state; None if weights are applied elsewhere."""
        return self._own_weight() if self.weigh_inside and self.weight_S is not None else None

    @counted(lambda rows: rows.weighing(rows.x.dtype))
    def _own_weight(self) -> Tensor | None:
        return self.weight_S

    @counted(lambda rows, rows_RD: rows.weighing(rows_RD.dtype))
    def weigh(self, rows_RD: Tensor) -> Tensor:
        """Each row times its weight, in the dtype of the rows."""
        assert self.weight_S is not None
        return rows_RD * self.weight_S.to(rows_RD.dtype).unsqueeze(-1)

    def weighing(self, dtype: torch.dtype) -> list[str]:
        """The fast-path counters for how rows are weighted."""
        paths = ["weigh.before_experts" if self.weigh_before else "weigh.after_experts"]
        return [*paths, "weigh.bfloat16"] if dtype == torch.bfloat16 else paths
