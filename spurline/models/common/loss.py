"""The loss of hidden states, without materializing the logits of all positions.

B sequences of L positions, T = B * L; D model width, V vocabulary, c positions of one chunk.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from spurline.accelerator import total_memory

LossSum = Callable[[Tensor, Tensor], Tensor]
"""Logits (B, L, V) and labels (B, L) -> the loss, summed over labels."""
CPU_CHUNK_BYTES = 768 << 20
"""Memory limit of a chunk on a CPU."""
CHUNK_SHARE = 64
"""On an accelerator, a chunk may use 1 / CHUNK_SHARE of its memory."""


def chunked_loss_sum(
    hidden_BLD: Tensor, labels_BL: Tensor, lm_head: Callable[[Tensor], Tensor], loss_sum: LossSum, vocab_size: int
) -> Tensor:
    """loss_sum(lm_head(hidden), labels), one chunk of positions at a time; vocab_size is this rank's shard of it.

    The logits of a chunk are computed, reduced to a loss and freed; the backward pass recomputes them. If all positions
    fit into one chunk, their logits are kept.
    """

    def chunk_loss(hidden_1cD: Tensor, labels_1c: Tensor) -> Tensor:
        return loss_sum(lm_head(hidden_1cD), labels_1c)

    hidden_1TD, labels_1T = hidden_BLD.flatten(0, 1).unsqueeze(0), labels_BL.flatten().unsqueeze(0)
    chunk = positions_per_chunk(hidden_BLD.device, hidden_BLD.dtype, vocab_size)
    if hidden_1TD.shape[1] <= chunk:
        return chunk_loss(hidden_1TD, labels_1T)
    chunks = zip(hidden_1TD.split(chunk, 1), labels_1T.split(chunk, 1), strict=True)
    losses = [checkpoint(chunk_loss, *parts, use_reentrant=False, preserve_rng_state=False) for parts in chunks]
    return torch.stack(losses).sum()


def positions_per_chunk(device: torch.device, dtype: torch.dtype, vocab_size: int) -> int:
    """How many positions fit into the memory limit of a chunk on the device, with all tensors of the logits' size."""
    # Log-probabilities and their gradient in float32; logits in the model's dtype and, if that is not float32, also
    # their float32 copy and their gradient.
    bytes_per_logit = 12 if dtype.itemsize >= 4 else 12 + 2 * dtype.itemsize
    memory = total_memory(device)
    num_bytes = CPU_CHUNK_BYTES if memory is None else memory // CHUNK_SHARE
    return max(1, num_bytes // (bytes_per_logit * vocab_size))
