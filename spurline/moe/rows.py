"""Rows: what experts work on, as a value.

T tokens of width D; R rows on this rank, in the order of its e experts. Rows may still lie among their tokens, may be
on their way from other ranks, or may be there: `tensor()` is the same in all three cases.
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
    """How many rows each expert on this rank has, in every form that is known without waiting for a device."""

    count_e: Tensor
    """(e,), int64; on the device, or on the host where that is where it was made."""
    host_e: list[int] | None = None
    """The same as host integers; None where only a device knows them, and while tracing."""
    group_range: tuple[int, int] | None = None
    """The fewest and the most rows of any expert in the group: the same on all ranks, so that all take one decision."""
    host_count_e: Tensor | None = None
    """count_e on the host, where count_e is on a device and a copy is at hand: traced too."""

    @staticmethod
    def on_host(host_e: list[int]) -> RowCounts:
        return RowCounts(torch.tensor(host_e), host_e)

    def with_host_count(self) -> RowCounts:
        """With host_count_e, for kernels that count on the host: the device is asked only if nobody else knows."""
        if self.host_count_e is not None:
            return self
        known = (
            self.count_e.cpu()
            if self.host_e is None or self.count_e.device.type == "cpu"
            else torch.tensor(self.host_e)
        )
        return replace(self, host_count_e=known)


class Arrival(Protocol):
    """Rows on their way: `wait()` returns them, (R, D), in the order of experts; and their weights, if they came along.

    Weights that came along, (R,), are applied by the experts; others by the plan that kept them, in `combine`.
    """

    def wait(self) -> Tensor | tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Rows:
    """The input of experts, and with `output` what they make of it."""

    x: Tensor
    """The rows, (R, D); or with token_S the tokens, (T, D), that they are taken from."""
    counts: RowCounts
    token_S: Tensor | None = None
    """The token of each row, while rows lie among their tokens: then a kernel may gather and combine by itself."""
    weight_S: Tensor | None = None
    """The routing weight of each row, if it is still to be applied."""
    weigh_before: bool = False
    """Whether weights multiply what goes into the experts instead of what comes out."""
    arrival: Arrival | None = None
    """Where rows are still on their way; then x is what this rank sent."""
    onto_TD: Tensor | None = None
    """What the combined rows are added onto: the output of the shared experts."""
    may_overwrite: bool = False
    """Whether onto_TD belongs to nobody else, so that rows may be added in place."""
    is_combined: bool = False
    """Whether x is already the layer's output, (T, D), by a kernel that combines by itself."""
    weigh_inside: bool = False
    """Whether weight_S lies in the order of the rows that experts see, so that experts may apply it."""
    start: Callable[[], Rows] | None = None
    """Where the host does not know yet how many rows go where: waits for that and sends the rows on their way."""
    on_arrival: Callable[[Tensor], Tensor] | None = None
    """What the rows pass through when they are there."""

    def started(self) -> Rows:
        """These rows on their way, with counts that the host knows."""
        if self.start is None:
            return self
        started, onto_TD, may_overwrite = self.start(), self.onto_TD, self.may_overwrite
        return replace(started, onto_TD=onto_TD, may_overwrite=may_overwrite, on_arrival=self.on_arrival)

    def arrived(self) -> Rows:
        """These rows, there: in the order of experts, with their weights if those came along."""
        if self.start is not None:
            return self.started().arrived()
        if self.arrival is None:
            return self
        arrived = self.arrival.wait()
        x_RD, weight_R = arrived if isinstance(arrived, tuple) else (arrived, None)
        rows = replace(self, x=x_RD if self.on_arrival is None else self.on_arrival(x_RD), arrival=None)
        return rows if weight_R is None else replace(rows, weight_S=weight_R, weigh_inside=True)

    def through(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """These rows, with `function` applied to them as soon as they are there."""
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
        """What the experts make of these rows: (R, D), in the same order; with is_weighed, weights are applied."""
        return replace(self, x=y_RD, arrival=None, weight_S=None if is_weighed else self.weight_S)

    def weight_to_apply(self) -> Tensor | None:
        """(R,): what experts are to multiply their hidden state by; None if that is not for them to do."""
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
        """What the fast-path counters call the way in which rows are weighed."""
        paths = ["weigh.before_experts" if self.weigh_before else "weigh.after_experts"]
        return [*paths, "weigh.bfloat16"] if dtype == torch.bfloat16 else paths
