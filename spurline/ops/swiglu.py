"""The SwiGLU activation, for the dense feed-forward and for experts."""

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, elementwise: two of (..., F) -> (..., F)."""
    return F.silu(gate) * up
