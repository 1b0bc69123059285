"""The loss on held-out data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from spurline.comm.metrics import Metric, Offered, reduce_metrics
from spurline.data.batch import IGNORE_INDEX, Batch

if TYPE_CHECKING:
    from spurline.train.trainer import Trainer


def has_validation(trainer: Trainer) -> bool:
    """Whether any data is held out, and the config wants it to be used."""
    return trainer.data.validation is not None and trainer.config.metrics.validation_batches > 0


@torch.no_grad()
def validation_loss(trainer: Trainer) -> float | None:
    """The mean loss per held-out token over all ranks, or None without validation data."""
    if trainer.data.validation is None or not has_validation(trainer):
        return None
    world, config = trainer.world, trainer.config
    total = torch.zeros((), device=trainer.device)
    num_tokens = torch.zeros((), device=trainer.device, dtype=torch.int64)
    size = config.training.local_batch_size * world.data_size
    trainer.model.eval()
    for whole in trainer.data.validation.batches(size, config.metrics.validation_batches):
        batch = share(whole, world.data_rank, world.data_size).to(trainer.device)
        total += trainer.loss_of(batch)
        num_tokens += trainer.count_tokens([batch.labels_BL])
    trainer.model.train()
    sums = {"loss": world.sum_over_losses(total), "tokens": num_tokens}
    read = reduce_metrics(Offered(name, "", Metric(value, "same")) for name, value in sums.items()).read()
    return read["loss"] / read["tokens"]


def share(batch: Batch, rank: int, size: int) -> Batch:
    """One of `size` equal parts of a batch; where it can't be cut evenly, sequences without labels fill up the last."""
    B = batch.tokens_BL.shape[0]
    per_rank = -(-B // size)
    rows = torch.arange(rank * per_rank, (rank + 1) * per_rank)
    part = batch.take(rows.clamp(max=B - 1).tolist())
    return replace(part, labels_BL=torch.where((rows < B).unsqueeze(1), part.labels_BL, IGNORE_INDEX))
