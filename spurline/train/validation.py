"""The loss on held-out data, per token and per byte of text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from spurline.comm.metrics import Metric, Offered, reduce_metrics
from spurline.data.batch import IGNORE_INDEX, Batch

if TYPE_CHECKING:
    from spurline.train.trainer import Trainer


class Validation(NamedTuple):
    """The loss of a model on held-out data."""

    loss: float
    """Nats per token."""
    bits_per_byte: float | None
    """Bits per byte of the text that these tokens encode, whatever the tokenizer; None if they encode none.

    Tokens without text, such as those between documents, add to the bits but not to the bytes."""


def has_validation(trainer: Trainer) -> bool:
    """Whether any data is held out, and the config uses it."""
    return trainer.data.validation is not None and trainer.config.metrics.validation_batches > 0


@torch.no_grad()
def validate(trainer: Trainer) -> Validation | None:
    """The mean loss of the held-out tokens over all ranks, or None without validation data."""
    if trainer.data.validation is None or not has_validation(trainer):
        return None
    world, config = trainer.world, trainer.config
    total = torch.zeros((), device=trainer.device)
    num_tokens = torch.zeros((), device=trainer.device, dtype=torch.int64)
    num_bytes, token_bytes_V = 0, torch.from_numpy(trainer.data.tokenizer.token_bytes)
    size = config.training.local_batch_size * world.data_size
    trainer.model.eval()
    for whole in trainer.data.validation.batches(size, config.metrics.validation_batches):
        num_bytes += count_text_bytes(whole.labels_BL, token_bytes_V)  # of all ranks: each has the full batch
        batch = share(whole, world.data_rank, world.data_size).to(trainer.device)
        total += trainer.loss_of(batch)
        num_tokens += trainer.count_tokens([batch.labels_BL])
    trainer.model.train()
    sums = {"loss": world.sum_over_losses(total), "tokens": num_tokens}
    read = reduce_metrics(Offered(name, "", Metric(value, "same")) for name, value in sums.items()).read()
    bits_per_byte = read["loss"] / math.log(2) / num_bytes if num_bytes else None
    return Validation(read["loss"] / read["tokens"], bits_per_byte)


def count_text_bytes(labels_BL: Tensor, token_bytes_V: Tensor) -> int:
    """Bytes of UTF-8 text that the labels, on the host, encode, except those that the loss ignores."""
    return int(token_bytes_V[labels_BL[labels_BL != IGNORE_INDEX]].sum())


def share(batch: Batch, rank: int, size: int) -> Batch:
    """One of `size` equal parts of a batch; if it can't be split evenly, sequences without labels pad the last ones."""
    B = batch.tokens_BL.shape[0]
    per_rank = -(-B // size)
    rows = torch.arange(rank * per_rank, (rank + 1) * per_rank)
    part = batch.take(rows.clamp(max=B - 1).tolist())
    return replace(part, labels_BL=torch.where((rows < B).unsqueeze(1), part.labels_BL, IGNORE_INDEX))
