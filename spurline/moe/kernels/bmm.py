"""Batched matmuls, for experts that all have the same number of rows.

e experts, c rows each, D width, F hidden width. Without gradients, SwiGLU experts use fused weights: copies laid out
for two batched matmuls, cached between calls.
"""

import torch
from torch import Tensor

from spurline.moe.kernels.kernel import Kernel, Verdict, Work
from spurline.moe.rows import Rows
from spurline.moe.telemetry import counted
from spurline.ops.functional import swiglu

MOST_FUSED_ROWS = 256
"""Rows per expert up to which fused weights pay off on a CPU: with more, weights leave the cache between matmuls."""


class BmmKernel(Kernel):
    def suits(self, work: Work) -> Verdict:
        if work.equal_rows is None:
            return Verdict(
                0,
                "needs the same number of rows for every expert, known on the host (as with force_load_balance)",
            )
        if work.device != "cpu":
            return Verdict(20, "batched matmuls of equal size")
        fused = not work.grad and work.cacheable and work.experts == "swiglu" and work.precision == "none"
        if fused and 0 < work.equal_rows <= MOST_FUSED_ROWS:
            return Verdict(40, f"at most {MOST_FUSED_ROWS} equal rows and no gradients: fused weights")
        return Verdict(6, "batched matmuls of equal size, on copies of the rows")

    @counted("experts.bmm")
    def run(self, experts, rows: Rows) -> Rows:  # type: ignore[no-untyped-def]
        rounds = experts.precision is not None
        if torch.is_grad_enabled() or rounds or experts.kind != "swiglu" or not experts.can_cache():
            return super().run(experts, rows)
        rows_RD = rows.tensor()
        w13_eDX, w2_eFD = experts.fused_weights.get(rows_RD.dtype, *experts.parameters())
        (R, D), e = rows_RD.shape, w2_eFD.shape[0]
        weight_R = rows.weight_to_apply()
        gate_ecF, up_ecF = (rows_RD.reshape(e, R // e, D) @ w13_eDX).chunk(2, dim=-1)
        hidden_ecF = swiglu(gate_ecF, up_ecF, None if weight_R is None else weight_R.view(e, R // e))
        return rows.output((hidden_ecF @ w2_eFD).flatten(0, 1), is_weighed=weight_R is not None)

    def matmul(self, rows_RI: Tensor, w_eOI: Tensor, count_e: Tensor) -> Tensor:
        rows_ecI = rows_RI.reshape(w_eOI.shape[0], rows_RI.shape[0] // w_eOI.shape[0], rows_RI.shape[1])
        out_ecO = rows_ecI @ w_eOI.transpose(-2, -1)
        # Not a view to autograd: FSDP2 warns about modules that return views.
        return torch.ops.aten._unsafe_view.default(out_ecO, [rows_RI.shape[0], w_eOI.shape[1]])

    def outer(self, a_RO: Tensor, b_RI: Tensor, count_e: Tensor) -> Tensor:
        e, c = count_e.shape[0], a_RO.shape[0] // count_e.shape[0]
        return a_RO.reshape(e, c, a_RO.shape[1]).transpose(-2, -1) @ b_RI.reshape(e, c, b_RI.shape[1])
