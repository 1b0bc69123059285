"""A router that ignores the norms of tokens and gates.

T tokens, D width, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from spurline.comm.gradients import local
from spurline.moe import Router


class CosineRouter(Router):
    """Scores experts by the cosine between token and gate, so that the norm of a token does not affect its scores."""

    temperature = 0.1

    def logits(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> (T, E)."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        x_TD, gate_ED = (F.normalize(part.to(dtype), dim=-1) for part in (x_TD, local(self.gate_ED)))
        return F.linear(x_TD, gate_ED) / self.temperature
