"""The experts of gpt-oss: SwiGLU with biases, whose inputs are clamped and whose gate is steeper."""

import torch
from torch import Tensor

from spurline.moe.experts.experts import Experts
from spurline.moe.kernels.products import Products

ALPHA, LIMIT = 1.702, 7.0


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), with gate at most 7 and up between -7 and 7; of any shape."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


class ClampedSwiGLUExperts(Experts):
    def formula(self, x_RD: Tensor, products: Products, *weights: Tensor) -> Tensor:
        w1_eFD, b1_eF, w3_eFD, b3_eF, w2_eDF, b2_eD = weights
        gate_RF = products.matmul(x_RD, w1_eFD) + products.per_row(b1_eF, x_RD)
        up_RF = products.matmul(x_RD, w3_eFD) + products.per_row(b3_eF, x_RD)
        out_RD = products.matmul(clamped_swiglu(gate_RF, up_RF), w2_eDF)
        return out_RD + products.per_row(b2_eD, x_RD) / self.hidden_shards
