"""What a position may see besides what precedes it. B sequences of L tokens."""

import torch
from torch import Tensor


def mask_of_documents(documents_BL: Tensor) -> Tensor:
    """True where a position (the third axis) sees another: its own document, up to itself. (B, L) -> (B, 1, L, L).

    Positions go on counting over a boundary: attention only knows how far apart two of them are.
    """
    length = documents_BL.shape[1]
    is_past_LL = torch.ones(length, length, dtype=torch.bool, device=documents_BL.device).tril()
    return (documents_BL.unsqueeze(2) == documents_BL.unsqueeze(1)).logical_and(is_past_LL).unsqueeze(1)
