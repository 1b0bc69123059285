"""One matmul per expert, in a loop: any dtype, any size, any counts, any device."""

import torch
from torch import Tensor

from spurline.moe.kernels.kernel import Kernel, Verdict, Work
from spurline.moe.rows import Rows
from spurline.moe.telemetry import counted


class LoopKernel(Kernel):
    counts_on_host = True

    def suits(self, work: Work) -> Verdict:
        if work.device == "cpu":
            return Verdict(10, "one product per expert")
        return Verdict(5, "one product per expert; waits for the row counts")

    @counted("experts.loop")
    def run(self, experts, rows: Rows) -> Rows:  # type: ignore[no-untyped-def]
        return super().run(experts, rows)

    def matmul(self, rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor) -> Tensor:
        out_RO = rows_RI.new_empty(rows_RI.shape[0], w_eOI.shape[1])
        start = 0
        for expert, num_rows in enumerate(_checked(count_e, rows_RI)):
            if num_rows:
                span = slice(start, start + num_rows)
                torch.mm(rows_RI[span], w_eOI[expert].t(), out=out_RO[span])
                start += num_rows
        return out_RO

    def outer(self, a_RO: Tensor, b_RI: Tensor, count_e: Tensor) -> Tensor:
        out_eOI = a_RO.new_empty(count_e.shape[0], a_RO.shape[1], b_RI.shape[1])
        start = 0
        for expert, num_rows in enumerate(_checked(count_e, a_RO)):
            if num_rows:
                span = slice(start, start + num_rows)
                torch.mm(a_RO[span].t(), b_RI[span], out=out_eOI[expert])
                start += num_rows
            else:
                out_eOI[expert].zero_()
        return out_eOI


def _checked(count_e: Tensor, rows: Tensor) -> list[int]:
    counts = count_e.tolist()
    assert sum(counts) == rows.shape[0], f"row counts add up to {sum(counts)}, but there are {rows.shape[0]} rows"
    return counts
