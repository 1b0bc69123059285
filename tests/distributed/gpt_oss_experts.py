"""The experts of gpt-oss, as one file that registers them: biases, clamped swish with alpha, interleaved gate and up.

R rows, D width, F hidden width, e experts on this rank. Weights lie as (E, in, out), as gpt-oss stores them.
"""

import torch
from torch import Tensor

from spurline.moe import Experts, register_experts
from spurline.moe.kernels.products import Products
from spurline.moe.layout import times

ALPHA, LIMIT = 1.702, 7.0


def clamped_swiglu(gate_up: Tensor) -> Tensor:
    """(.., 2F), gate and up in turn -> (.., F)."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * torch.sigmoid(ALPHA * gate)


class GptOssExperts(Experts):
    def formula(self, x_RD: Tensor, products: Products, *weights: Tensor) -> Tensor:
        w1_eDX, b1_eX, w2_eFD, b2_eD = weights
        gate_up_RX = products.matmul(x_RD, w1_eDX.mT) + products.per_row(b1_eX, x_RD)
        out_RD = products.matmul(clamped_swiglu(gate_up_RX), w2_eFD.mT)
        return out_RD + products.per_row(b2_eD, x_RD) / self.hidden_shards


register_experts(
    "gpt_oss",
    GptOssExperts,
    {
        "w1_EDX": ("expert", "width", times("hidden", 2)),
        "b1_EX": ("expert", times("hidden", 2)),
        "w2_EFD": ("expert", "hidden", "width"),
        "b2_ED": ("expert", "width"),
    },
)
