"""SwiGLU experts: w2(silu(w1 x) * w3 x)."""

from typing import Any

from torch import Tensor

from spurline.moe.experts.experts import Experts
from spurline.moe.kernels.products import Products
from spurline.ops.functional import swiglu


class SwiGLUExperts(Experts):
    applies_weights = True  # the last matmul is linear: a row's weight may multiply its input

    def formula(self, x_RD: Tensor, products: Products, *weights: Any) -> Tensor:
        w1_eFD, w3_eFD, w2_eDF = weights
        hidden_RF = swiglu(products.matmul(x_RD, w1_eFD), products.matmul(x_RD, w3_eFD), products.weight_R)
        return products.matmul(hidden_RF, w2_eDF)
