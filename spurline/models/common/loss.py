"""The loss of hidden states, without ever holding the logits of all positions.

B sequences of L positions, T = B * L; D model width, V vocabulary, c positions of one chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LossSum = Callable[[Tensor, Tensor], Tensor]
"""Logits (B, L, V) and labels (B, L) -> the loss, summed over labels."""
MAX_LOGITS = 1 << 26
"""Logits that are held at once: 256 MB in float32."""


def chunked_loss_sum(
    hidden_BLD: Tensor, labels_BL: Tensor, lm_head: Callable[[Tensor], Tensor], loss_sum: LossSum, vocab_size: int
) -> Tensor:
    """loss_sum(lm_head(hidden), labels), a chunk of positions at a time.

    The logits of a chunk are computed, reduced to their loss and freed; the backward pass computes them again. All of
    them are kept where they fit into one chunk.
    """

    def chunk_loss(hidden_1cD: Tensor, labels_1c: Tensor) -> Tensor:
        return loss_sum(lm_head(hidden_1cD), labels_1c)

    hidden_1TD, labels_1T = hidden_BLD.flatten(0, 1).unsqueeze(0), labels_BL.flatten().unsqueeze(0)
    chunk = max(1, MAX_LOGITS // vocab_size)
    if hidden_1TD.shape[1] <= chunk:
        return chunk_loss(hidden_1TD, labels_1T)
    chunks = zip(hidden_1TD.split(chunk, 1), labels_1T.split(chunk, 1), strict=True)
    losses = [checkpoint(chunk_loss, *parts, use_reentrant=False, preserve_rng_state=False) for parts in chunks]
    return torch.stack(losses).sum()
