"""Sliding windows. B sequences of L positions, which are the last of S keys."""

import torch
from torch import Tensor


def in_window(mask_B1LS: Tensor | None, q_BHLR: Tensor, num_keys: int, window: int) -> Tensor | None:
    """The mask of a layer whose queries see `window` positions, themselves included (0 = all before them).

    Without a mask, attention is causal. Queries are the last of the num_keys positions.
    """
    if window == 0 or num_keys <= window:
        return mask_B1LS
    key_S = torch.arange(num_keys, device=q_BHLR.device)
    query_L1 = key_S[num_keys - q_BHLR.shape[-2] :].unsqueeze(1)
    near_LS = key_S > query_L1 - window
    return near_LS & (key_S <= query_L1) if mask_B1LS is None else mask_B1LS & near_LS
