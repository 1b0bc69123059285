"""One training step: gradients of all micro-batches, clip, optimizer, balance.

B sequences of L tokens in a micro-batch; G sequences in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spurline.comm.gradients import reduce_gradients
from spurline.comm.metrics import reset_metrics
from spurline.config import RunConfig
from spurline.data import DataSets
from spurline.data.batch import Batch
from spurline.data.prefetch import Prefetcher
from spurline.device import is_accelerator, use_device
from spurline.moe.balance import set_token_weight, update_expert_bias
from spurline.parallel.pipeline import PipelinedModel, TrainingPipeline
from spurline.parallel.world import World
from spurline.train.bad_steps import BadSteps
from spurline.train.fingerprint import fingerprint
from spurline.train.loss import count_real_tokens
from spurline.train.metrics.step_metrics import StepMetrics
from spurline.train.metrics.tally import StepTally
from spurline.train.metrics.timing import StepTimer
from spurline.train.optimizer.build import build_optimizer
from spurline.train.optimizer.clip import clip_gradients, gradient_norms
from spurline.train.optimizer.masked import step_unless
from spurline.train.optimizer.schedule import learning_rate, set_learning_rate
from spurline.train.position import Position
from spurline.train.routing_record import RoutingRecord
from spurline.train.setup import (
    build_loss,
    build_model,
    build_timer,
    open_data_for_model,
    set_up_torch,
    weights_changed,
)


@dataclass
class Trainer:
    """Everything that a step needs, built once."""

    config: RunConfig[Any]
    world: World
    data: DataSets
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_sum: Callable[[Tensor, Tensor], Tensor]
    timer: StepTimer = field(default_factory=StepTimer)
    base: dict[str, Any] = field(default_factory=dict)
    """The entry in checkpoints that identifies the base weights; empty without adapters."""
    start: Position = field(default_factory=Position, init=False)
    """Where the run began or was resumed; the data of a step is counted from here."""
    tally: StepTally = field(init=False)
    pipeline: Any = field(default=None, init=False)
    """Runs micro-batches through pipeline stages: a TrainingPipeline, created at the first step."""
    bad_steps: BadSteps = field(init=False)
    routing: RoutingRecord | None = field(default=None, init=False)
    _fingerprint: dict[str, Any] | None = field(default=None, init=False)
    _prefetcher: Prefetcher[list[Batch]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.bad_steps = BadSteps(self)
        self.tally = StepTally(self.device, self.bad_steps.report)
        if self.config.debug.record_routing or self.config.debug.replay_routing:
            self.routing = RoutingRecord(self.model, self.config, self.world, self.global_batch_size)

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def global_batch_size(self) -> int:
        training = self.config.training
        if training.global_batch_size > 0:
            return training.global_batch_size
        return training.local_batch_size * self.world.data_size

    def fingerprint(self) -> dict[str, Any]:
        """Options and data that affect the run's numbers, computed once."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self.config, self.global_batch_size, self.data)
        return self._fingerprint

    def resume_at(self, position: Position) -> None:
        """Continue with the step and the sequence after `position`."""
        self.start, self.tally.tokens_seen = position, position.tokens_seen

    def first_sequence(self, step: int) -> int:
        """The position in the data at which a step begins."""
        return self.start.sequences_seen + (step - 1 - self.start.step) * self.global_batch_size

    def position_after(self, step: int) -> Position:
        return Position(step, self.tally.tokens_seen, self.first_sequence(step + 1))

    def step(self, step: int) -> StepMetrics:
        """Take optimizer step number `step`, counted from 1, without a host read.

        A non-finite step leaves weights, optimizer and balance as they are; reading its metrics reports it.
        """
        config = self.config
        lr = learning_rate(step, config.training.steps, config.optimizer.lr, config.lr_scheduler)
        set_learning_rate(self.optimizer, lr)
        reset_metrics(self.model)

        with self.timer.phase("data"):
            micro_batches = self.micro_batches(step)
        num_tokens = self.count_tokens(batch.labels_BL for batch in micro_batches)
        with self.routing.step(step) if self.routing else nullcontext():
            loss = self.accumulate_gradients(micro_batches, num_tokens)
        with self.timer.phase("optimizer"):
            parameters = list(self.model.parameters())
            norms_P = gradient_norms(parameters)
            grad_norm = self.clip_gradients(parameters, norms_P)
            failed = self.tally.note(step, num_tokens, loss, grad_norm)
            self.bad_steps.note(failed, norms_P)
            step_unless(failed, self.optimizer)
            self.optimizer.zero_grad()
            weights_changed(self.model)
            update_expert_bias(self.model, self.world.stage_group, unless=failed)
        return StepMetrics(step, lr, num_tokens, loss, grad_norm, self.model, self.tally, self.world.meshes)

    def accumulate_gradients(self, micro_batches: list[Batch], num_tokens: Tensor) -> Tensor:
        """Run forward and backward on every micro-batch; returns the mean loss of the `num_tokens` on all ranks."""
        # Every token of the step has the same weight, in the language-model loss and in the balance losses.
        set_token_weight(self.model, 1 / num_tokens)
        if isinstance(self.model, PipelinedModel):
            return self.world.sum_over_losses(self._through_stages(self.model, micro_batches, num_tokens))
        total = torch.zeros((), device=self.device)
        once = len(micro_batches) > 1 and not self.config.parallelism.fsdp_reduce_each_micro_batch
        for number, batch in enumerate(micro_batches, 1):
            if self.routing:
                self.routing.micro_batch(number)
            if once:
                reduce_gradients(self.model, number == len(micro_batches))
            with self.timer.phase("forward"):
                loss = self.loss_of(batch) / num_tokens
            with self.timer.phase("backward"):
                loss.backward()
            total += loss.detach()
            self.bad_steps.note_micro_batch(loss)
        return self.world.sum_over_losses(total)

    def _through_stages(self, model: PipelinedModel, micro_batches: list[Batch], num_tokens: Tensor) -> Tensor:
        """The same with a pipeline schedule; returns this rank's share of the loss."""
        if self.pipeline is None:
            tokens_BL = micro_batches[0].tokens_BL
            self.pipeline = TrainingPipeline(model, len(micro_batches), tokens_BL, self.timer.phase)

        def loss_of(part: Any, batch: Batch, hidden_BlD: Tensor | None) -> Tensor:
            out = self.loss_of(batch, part, hidden_BlD=hidden_BlD)
            return out / num_tokens if part.is_last_stage else out

        routing = self.routing
        announce = None if routing is None else (lambda number: routing.micro_batch(number + 1))
        losses: list[Tensor] = self.pipeline.step(micro_batches, loss_of, announce)
        for loss in losses:
            self.bad_steps.note_micro_batch(loss)
        model.sum_gradients_of_copies()
        return torch.stack(losses).sum() if losses else torch.zeros((), device=self.device)

    def clip_gradients(self, parameters: list[nn.Parameter], norms_P: Tensor) -> Tensor:
        """Clip by the norm of all gradients of the model, over all ranks; returns the norm."""
        max_norm, group, sharers = self.config.training.max_grad_norm, self.world.group, self.world.degrees.stage
        elsewhere = self.model.second_copies() if isinstance(self.model, PipelinedModel) else set()
        return clip_gradients(parameters, max_norm, group, norms_P, sharers, elsewhere)

    def loss_of(self, batch: Batch, model: nn.Module | None = None, **options: Any) -> Tensor:
        """The loss of a micro-batch, summed over its real tokens; for a pipeline stage, its output."""
        options = {**batch.extras, **options}
        return (model or self.model)(batch.tokens_BL, labels_BL=batch.labels_BL, loss_sum=self.loss_sum, **options)

    def micro_batches(self, step: int) -> list[Batch]:
        """This rank's sequences of the step, on its device."""
        made = self.micro_batches_on_host(step) if self._prefetcher is None else self._prefetcher.get(step)
        return [batch.to(self.device) for batch in made]

    @contextmanager
    def prefetching(self, steps: range) -> Iterator[None]:
        """While inside, a thread prepares the batches of upcoming steps, which must be taken in order."""
        with Prefetcher(self.micro_batches_on_host, steps, set_up=partial(use_device, self.device)) as prefetcher:
            self._prefetcher = prefetcher
            try:
                yield
            finally:
                self._prefetcher = None

    def micro_batches_on_host(self, step: int) -> list[Batch]:
        """The same in host memory, pinned if an accelerator is to copy it."""
        size, world = self.config.training.local_batch_size, self.world
        first = self.first_sequence(step) + world.data_rank * size
        starts = range(first, first + self.global_batch_size, size * world.data_size)
        batches = [self.data.train.batch(start, size) for start in starts]
        return [batch.pin_memory() for batch in batches] if is_accelerator(self.device) else batches

    def count_tokens(self, labels: Iterable[Tensor]) -> Tensor:
        """The real tokens of all ranks, counted on the device."""
        own = torch.stack([count_real_tokens(labels_BL) for labels_BL in labels]).sum()
        return self.world.sum_over_data(own)


def make_trainer(
    config: RunConfig[Any], world: World | None = None, data: DataSets | None = None, *, draw_weights: bool = True
) -> Trainer:
    """Build the model with seeded weights, and everything else a step needs: by default on one rank, with config.data.

    With draw_weights=False the caller loads weights, or draws them with `initialize_parameters`.
    """
    world = world or World.alone(config.training.device)
    set_up_torch(config)
    data = data or open_data_for_model(config)
    model = build_model(config, world, draw_weights)
    optimizer = build_optimizer(model, config.optimizer)
    return Trainer(config, world, data, model, optimizer, build_loss(config, model), build_timer(config, model, world))
