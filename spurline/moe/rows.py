"""Rows: what experts work on, as a value.

T tokens of width D; R rows on this rank, in the order of its e experts. Rows may still lie among their tokens, may be
on their way from other ranks, or may be there: `tensor()` is the same in all three cases.
"""

from __future__ import annotations

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

    @staticmethod
    def on_host(host_e: list[int]) -> RowCounts:
        return RowCounts(torch.tensor(host_e), host_e)


class Arrival(Protocol):
    """Rows on their way: `wait()` returns them, (R, D), in the order of experts."""

    def wait(self) -> Tensor: ...


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

    def tensor(self) -> Tensor:
        """(R, D): gathered from the tokens or received from other ranks, ready to be multiplied."""
        if self.arrival is not None:
            return self.arrival.wait()
        if self.token_S is None:
            return self.x
        rows_RD = gather_rows(self.x, self.token_S)
        return self.weigh(rows_RD) if self.weigh_before else rows_RD

    def output(self, y_RD: Tensor) -> Rows:
        """What the experts make of these rows: (R, D), in the same order."""
        return replace(self, x=y_RD, arrival=None)

    @counted(lambda rows, rows_RD: rows.weighing(rows_RD.dtype))
    def weigh(self, rows_RD: Tensor) -> Tensor:
        """Each row times its weight, in the dtype of the rows."""
        assert self.weight_S is not None
        return rows_RD * self.weight_S.to(rows_RD.dtype).unsqueeze(-1)

    def weighing(self, dtype: torch.dtype) -> list[str]:
        """What the fast-path counters call the way in which rows are weighed."""
        paths = ["weigh.before_experts" if self.weigh_before else "weigh.after_experts"]
        return [*paths, "weigh.bfloat16"] if dtype == torch.bfloat16 else paths
