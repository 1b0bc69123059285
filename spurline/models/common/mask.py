"""Attention masks. B sequences of L positions."""

import torch
from torch import Tensor


def document_mask(documents_BL: Tensor) -> Tensor:
    """Causal attention within each document: (B, L) document ids -> (B, 1, L, L), True where a query sees a key.

    Rotary positions go on counting across a boundary: attention depends only on the distance between two positions.
    """
    length = documents_BL.shape[1]
    causal_LL = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril()
    return (documents_BL.unsqueeze(2) == documents_BL.unsqueeze(1)).logical_and(causal_LL).unsqueeze(1)
