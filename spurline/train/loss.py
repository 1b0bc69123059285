"""The language-model loss: a sum over real tokens, so that micro-batches and ranks simply add up."""

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def cross_entropy_sum(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """(B, L, V) and (B, L) -> the cross-entropy in fp32, summed over the labels that are not IGNORE_INDEX."""
    return F.cross_entropy(
        logits_BLV.flatten(0, 1).float(), labels_BL.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
    )


def count_real_tokens(labels_BL: Tensor) -> int:
    return int((labels_BL != IGNORE_INDEX).sum())
