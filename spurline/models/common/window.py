"""Sliding-window attention. B sequences of L query positions, by default the last of S keys."""

import torch
from torch import Tensor


def in_window(
    mask_B1LS: Tensor | None, q_BHLR: Tensor, num_keys: int, window: int, query_L: Tensor | None = None
) -> Tensor | None:
    """The mask of a layer whose queries see `window` positions, including their own (0: all before them).

    Without a mask, attention is causal. query_L are the positions of the queries, if they are not the last ones.
    """
    if window == 0 or num_keys <= window:
        return mask_B1LS
    key_S = torch.arange(num_keys, device=q_BHLR.device)
    query_L1 = (key_S[num_keys - q_BHLR.shape[-2] :] if query_L is None else query_L).unsqueeze(1)
    near_LS = key_S > query_L1 - window
    return near_LS & (key_S <= query_L1) if mask_B1LS is None else mask_B1LS & near_LS
