"""The interface of kernels, which compute the grouped matmuls of experts.

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
    """Everything that the choice of a kernel depends on."""

    experts: str
    """The registered name of the experts: "swiglu", ..."""
    device: str
    dtype: torch.dtype
    width: int
    hidden: int
    equal_rows: int | None = None
    """The rows per expert, if all experts have the same number and the host knows it."""
    grad: bool = True
    """Whether gradients are recorded."""
    cacheable: bool = True
    """Whether copies of the weights may be kept between calls, as changes to them can be detected."""
    precision: str = "none"
    """The 8-bit recipe, which needs a kernel with `matmul`."""
    adapted: bool = False
    """Whether weights have adapters, which need a kernel with `matmul`."""


class Verdict(NamedTuple):
    """A kernel's score for some work and the reason: the highest score is chosen, 0 means that it can't be done."""

    score: int
    why: str


def rounds_no_operands(work: Work) -> Verdict | None:
    """The verdict of a fused kernel on 8-bit matmuls: it can't do them. None without a recipe."""
    return None if work.precision == "none" else Verdict(0, f"does not round operands, as {work.precision} does")


class Kernel:
    """A way to compute experts. A subclass defines `suits`, and either `matmul` and `outer`, or `run`."""

    name: str = ""
    counts_on_host: ClassVar[bool] = False
    """Whether `matmul` and `outer` read row counts on the host."""

    def suits(self, work: Work) -> Verdict:
        """This kernel's score for the work, and why."""
        return Verdict(1, "chosen by name only")

    def matmul(self, rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor) -> Tensor:
        """(R, I) and (e, O, I) -> (R, O): each row times the transposed matrix of its expert. No autograd needed."""
        raise NotImplementedError

    def outer(self, a_RO: Tensor, b_RI: Tensor, count_e: Tensor) -> Tensor:
        """(R, O) and (R, I) -> (e, O, I): each expert's a^T b, zeros without rows. No autograd needed."""
        raise NotImplementedError

    @property
    def multiplies(self) -> bool:
        """Whether it defines `matmul`."""
        return type(self).matmul is not Kernel.matmul

    def run(self, experts: Experts, rows: Rows) -> Rows:
        """The experts' output for these rows; by default their formula, one grouped matmul at a time."""
        return experts.by_products(self, rows)


class FunctionKernel(Kernel):
    """A user's function that computes complete SwiGLU experts, from `register_experts_backend`."""

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
