"""The language-model loss: a sum over real tokens, so that the losses of micro-batches and ranks add up."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from spurline.data.batch import IGNORE_INDEX
from spurline.parallel.tensor import TensorParallel


def cross_entropy_sum(logits_BLV: Tensor, labels_BL: Tensor) -> Tensor:
    """(B, L, V) and (B, L) -> the cross-entropy in fp32, summed over the labels that are not IGNORE_INDEX."""
    return F.cross_entropy(
        logits_BLV.flatten(0, 1).float(), labels_BL.flatten(), reduction="sum", ignore_index=IGNORE_INDEX
    )


def make_loss_sum(tp: TensorParallel) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss for a model whose logits are sharded by vocabulary over the ranks of tp, if there are any."""
    if tp.group is None:
        return cross_entropy_sum
    return partial(tp.cross_entropy_sum, ignore_index=IGNORE_INDEX)


def count_real_tokens(labels_BL: Tensor) -> Tensor:
    """(B, L) -> (): the labels that are not IGNORE_INDEX, counted on their device."""
    return (labels_BL != IGNORE_INDEX).sum()
