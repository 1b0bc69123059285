"""SwiGLU experts: w2(silu(w1 x) * w3 x)."""

from torch import Tensor

from spurline.moe.experts.experts import Experts
from spurline.moe.kernels.products import Products
from spurline.ops.functional import swiglu


class SwiGLUExperts(Experts):
    applies_weights = True  # the last product is linear: a row's weight may multiply what goes into it

    def formula(self, x_RD: Tensor, products: Products, *weights: Tensor) -> Tensor:
        w1_eFD, w3_eFD, w2_eDF = weights
        hidden_RF = swiglu(products.matmul(x_RD, w1_eFD), products.matmul(x_RD, w3_eFD), products.weight_R)
        return products.matmul(hidden_RF, w2_eDF)
