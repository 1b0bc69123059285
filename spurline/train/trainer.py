"""One training step: gradients of all micro-batches, clip, optimizer, balance.

B sequences of L tokens in a micro-batch; G sequences in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from spurline.comm.metrics import reset_metrics
from spurline.config import RunConfig
from spurline.data import DataSets
from spurline.data.batch import Batch
from spurline.moe.balance import set_token_weight, update_expert_bias
from spurline.parallel.world import World
from spurline.train.loss import count_real_tokens
from spurline.train.metrics.step_metrics import StepMetrics
from spurline.train.metrics.timing import StepTimer
from spurline.train.optimizer.build import build_optimizer
from spurline.train.optimizer.clip import clip_gradients
from spurline.train.optimizer.schedule import learning_rate, set_learning_rate
from spurline.train.setup import build_loss, build_model, build_timer, open_data_for_model, set_up_torch


@dataclass
class Trainer:
    """What a step needs, built once."""

    config: RunConfig[Any]
    world: World
    data: DataSets
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    timer: StepTimer = field(default_factory=StepTimer)

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def global_batch_size(self) -> int:
        training = self.config.training
        if training.global_batch_size > 0:
            return training.global_batch_size
        return training.local_batch_size * self.world.data_size

    def step(self, step: int) -> StepMetrics:
        """Take optimizer step number `step`, counted from 1; a ValueError refuses one that is not finite."""
        config = self.config
        lr = learning_rate(step, config.training.steps, config.optimizer.lr, config.lr_scheduler)
        set_learning_rate(self.optimizer, lr)
        reset_metrics(self.model)

        with self.timer.phase("data"):
            micro_batches = self.micro_batches(step)
        num_tokens = self.count_tokens(batch.labels_BL for batch in micro_batches)
        loss = self.accumulate_gradients(micro_batches, num_tokens)
        with self.timer.phase("optimizer"):
            grad_norm = clip_gradients(self.model.parameters(), config.training.max_grad_norm, self.world.group)
            self.refuse_unless_finite(step, loss, grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            update_expert_bias(self.model, self.world.group)
        return StepMetrics(step, lr, num_tokens, loss, grad_norm, self.model, self.world.group)

    def accumulate_gradients(self, micro_batches: list[Batch], num_tokens: int) -> Tensor:
        """Forward and backward of every micro-batch; returns the mean loss of the step's `num_tokens`, of all ranks."""
        # Every token of the step weighs the same, in the language-model loss as in the balance losses.
        set_token_weight(self.model, 1 / num_tokens)
        total = torch.zeros((), device=self.device)
        for batch in micro_batches:
            with self.timer.phase("forward"):
                loss = self.loss_of(batch) / num_tokens
            with self.timer.phase("backward"):
                loss.backward()
            total += loss.detach()
        return self.world.sum_over_data(total)

    def loss_of(self, batch: Batch) -> Tensor:
        """The loss of a micro-batch, summed over its real tokens."""
        return self.model(batch.tokens_BL, labels_BL=batch.labels_BL, loss_sum=self.loss_sum, **batch.extras)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's sequences of the step."""
        size, world = self.config.training.local_batch_size, self.world
        first = (step - 1) * self.global_batch_size + world.data_rank * size
        starts = range(first, first + self.global_batch_size, size * world.data_size)
        return [self.data.train.batch(start, size).to(self.device) for start in starts]

    def count_tokens(self, labels: Iterable[Tensor]) -> int:
        """The real tokens of all ranks."""
        own = torch.stack([count_real_tokens(labels_BL) for labels_BL in labels]).sum()
        return int(self.world.sum_over_data(own))

    def refuse_unless_finite(self, step: int, loss: Tensor, grad_norm: Tensor) -> None:
        """Raise a ValueError unless the step can be taken: the only read of its results, in one place."""
        if not torch.isfinite(loss + grad_norm):
            what = f"the loss is {loss.item()} and the gradient norm {grad_norm.item()}"
            raise diverged(self.config, step, what)


def diverged(config: RunConfig[Any], step: int, what: str) -> ValueError:
    return ValueError(
        f"step {step}: {what}. Try a lower --optimizer.lr (now {config.optimizer.lr})"
        " or a longer --lr_scheduler.warmup_steps"
    )


def make_trainer(config: RunConfig[Any], world: World | None = None, data: DataSets | None = None) -> Trainer:
    """Build the model with its seeded weights, and everything else a step needs: by default alone, on config.data."""
    world = world or World.alone()
    set_up_torch(config)
    data = data or open_data_for_model(config)
    model = build_model(config, world)
    optimizer = build_optimizer(model, config.optimizer)
    return Trainer(config, world, data, model, optimizer, build_loss(config, model), build_timer(config, model, world))
