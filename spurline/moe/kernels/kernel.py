"""What a kernel is: how the products of experts are computed.

R rows sorted by expert, e experts on this rank, I inputs, O outputs, D width, F hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from spurline.moe.rows import Rows

if TYPE_CHECKING:
    from spurline.moe.experts.experts import Experts


@dataclass(frozen=True)
class Work:
    """All that the choice of a kernel depends on."""

    experts: str
    """The registered name of the experts: "swiglu", ..."""
    device: str
    dtype: torch.dtype
    width: int
    hidden: int
    equal_rows: int | None = None
    """The rows of every expert, if it is one number and the host knows it."""
    grad: bool = True
    """Whether gradients are recorded."""
    cacheable: bool = True
    """Whether copies of the weights may be kept between calls: edits of them can be noticed."""
    precision: str = "none"
    """The recipe of products in 8 bits: they are made one by one."""


class Verdict(NamedTuple):
    """What a kernel says of some work: the highest score is chosen, 0 means that it can't be done."""

    score: int
    why: str


def rounds_no_operands(work: Work) -> Verdict | None:
    """What a kernel that computes experts as a whole says of products in 8 bits."""
    return None if work.precision == "none" else Verdict(0, f"does not round operands, as {work.precision} does")


class Kernel:
    """A way to compute grouped products. A subclass gives `suits`, and `matmul` and `outer`, or `run` as a whole."""

    name: str = ""
    counts_on_host: ClassVar[bool] = False
    """Whether `matmul` and `outer` read row counts on the host."""

    def suits(self, work: Work) -> Verdict:
        """What this kernel is worth for the work, and why."""
        return Verdict(1, "chosen by name only")

    def matmul(self, rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor) -> Tensor:
        """(R, I) and (e, O, I) -> (R, O): each row times the transposed matrix of its expert. No autograd needed."""
        raise NotImplementedError

    def outer(self, a_RO: Tensor, b_RI: Tensor, count_e: Tensor) -> Tensor:
        """(R, O) and (R, I) -> (e, O, I): each expert's a^T b, zeros without rows. No autograd needed."""
        raise NotImplementedError

    def run(self, experts: Experts, rows: Rows) -> Rows:
        """The experts' output for these rows; by default their formula, product by product."""
        return experts.by_products(self, rows)


class FunctionKernel(Kernel):
    """A user's function that computes SwiGLU experts as a whole, as `register_experts_backend` takes it."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def suits(self, work: Work) -> Verdict:
        if work.experts != "swiglu":
            return Verdict(0, f"computes SwiGLU experts, not {work.experts!r} ones")
        return rounds_no_operands(work) or super().suits(work)

    def run(self, experts: Experts, rows: Rows) -> Rows:
        rows_RD = rows.tensor()
        counts = rows.counts.count_e if rows.counts.host_e is None else rows.counts.host_e
        return rows.output(self.function(rows_RD, *(w.to(rows_RD.dtype) for w in experts.weights()), counts))
