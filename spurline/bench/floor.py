"""The floor: only the expert matmuls and activations, on rows that are already sorted by expert.

No routing, gather or combine, and all outputs are preallocated.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class Floor:
    """R rows (R, D), sorted by expert, and the weights of e experts."""

    def __init__(
        self, rows_RD: Tensor, w1_eFD: Tensor, w3_eFD: Tensor, w2_eDF: Tensor, counts: list[int], grad_RD: Tensor
    ) -> None:
        self.rows_RD, self.w1, self.w3, self.w2, self.grad_RD = rows_RD, w1_eFD, w3_eFD, w2_eDF, grad_RD
        R, F_ = rows_RD.shape[0], w1_eFD.shape[1]
        self.gate_RF, self.up_RF = rows_RD.new_zeros(2, R, F_)
        self.out_RD, self.dx_RD = torch.zeros_like(rows_RD), torch.zeros_like(rows_RD)
        self.dw1, self.dw3, self.dw2 = (torch.zeros_like(w) for w in (w1_eFD, w3_eFD, w2_eDF))
        ends = torch.tensor(counts).cumsum(0).tolist()
        self.spans = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]

    def forward(self) -> None:
        for expert, span in enumerate(self.spans):
            if span.start < span.stop:
                rows, gate, up = self.rows_RD[span], self.gate_RF[span], self.up_RF[span]
                torch.mm(rows, self.w1[expert].t(), out=gate)
                torch.mm(rows, self.w3[expert].t(), out=up)
                torch.mm(F.silu(gate) * up, self.w2[expert].t(), out=self.out_RD[span])

    def forward_and_backward(self) -> None:
        self.forward()
        for expert, span in enumerate(self.spans):
            if span.start == span.stop:
                for grad in (self.dw1, self.dw3, self.dw2):
                    grad[expert].zero_()
                continue
            rows, gate, up, grad = self.rows_RD[span], self.gate_RF[span], self.up_RF[span], self.grad_RD[span]
            active = F.silu(gate)
            torch.mm(grad.t(), active * up, out=self.dw2[expert])
            dhidden = torch.mm(grad, self.w2[expert])
            dup = dhidden * active
            dgate = torch.ops.aten.silu_backward(dhidden * up, gate)
            torch.mm(dgate.t(), rows, out=self.dw1[expert])
            torch.mm(dup.t(), rows, out=self.dw3[expert])
            torch.mm(dgate, self.w1[expert], out=self.dx_RD[span]).addmm_(dup, self.w3[expert])
