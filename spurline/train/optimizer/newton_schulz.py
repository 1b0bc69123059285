"""Newton-Schulz orthogonalization of many matrices at once, for Muon.

n matrices of A rows and B columns.
"""

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration in Keller Jordan's Muon; torch.optim.Muon uses the same."""
EPS = 1e-7
"""The smallest norm that a matrix is divided by."""


def orthogonalize(x_nAB: Tensor, steps: int) -> Tensor:
    """Bring all singular values of each matrix close to 1: (n, A, B) -> (n, A, B), in the dtype of x.

    The iteration multiplies on the shorter side, and batched: each step is three products of n matrices. It brings
    singular values to about 0.7 to 1.2, not exactly to 1, which is enough for Muon, and faster.
    """
    a, b, c = COEFFICIENTS
    is_tall = x_nAB.size(-2) > x_nAB.size(-1)
    x = x_nAB.mT if is_tall else x_nAB
    # The Frobenius norm bounds the largest singular value, so that it is at most 1 at the start.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if is_tall else x


def update_scale(num_rows: int, num_columns: int, adjust_lr: str) -> float:
    """The factor on the learning rate for a matrix of this shape; the names are those of torch.optim.Muon.

    original: updates of tall matrices are scaled up as in Keller Jordan's Muon. match_rms_adamw: the entries of an
    update are about as large as AdamW's, so that a learning rate and a weight decay tuned for AdamW carry over.
    """
    if adjust_lr == "original":
        return math.sqrt(max(1, num_rows / num_columns))
    assert adjust_lr == "match_rms_adamw", f"there is no adjust_lr {adjust_lr!r}"
    return 0.2 * math.sqrt(max(num_rows, num_columns))
