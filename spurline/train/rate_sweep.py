"""Try learning rates: short runs from the same weights on the same batches, one for each rate.

A ramp within one run confounds the rate with the progress made so far and with the noise of single batches. Runs that
differ only in their rate see the same batches, so that batch noise cancels in their differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from spurline.config import LRScheduler, RunConfig
from spurline.models.common.init import initialize_buffers, initialize_parameters
from spurline.parallel.world import World
from spurline.train.base_model import load_base
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.checkpoint.signature import read_key
from spurline.train.initial_load import has_own_checkpoint
from spurline.train.initial_weights import load_initial_weights
from spurline.train.optimizer.build import build_optimizer
from spurline.train.setup import weights_changed
from spurline.train.trainer import Trainer, make_trainer

HOPELESS = 1.5
"""A run ends when its loss exceeds this many times the loss of its first step."""
STANDARD_ERRORS = 2.0
"""Two rates are equally good if their losses differ by no more than this many standard errors."""

MOST_NOISE = 0.02
"""... and by no more than this share of the best rate's progress."""


@dataclass(frozen=True)
class Trial:
    """The result of one rate: the loss before each step; fewer losses than steps if it diverged."""

    lr: float
    losses: list[float]
    num_steps: int

    @property
    def diverged(self) -> bool:
        return len(self.losses) < self.num_steps

    def end(self) -> list[float]:
        """The losses of the last quarter of the steps, by which rates are compared."""
        return [] if self.diverged else self.losses[-max(1, self.num_steps // 4) :]

    @property
    def loss(self) -> float:
        return math.inf if self.diverged else statistics.fmean(self.end())


@dataclass(frozen=True)
class Suggestion:
    lr: float
    """The smallest rate that is as good as the best one, up to noise."""
    best: float
    """The rate with the lowest loss."""
    at_edge: str = ""
    """Which end of the tried range the best rate is at, if any: then the range should be extended."""


def rates_between(low: float, high: float, per_decade: int) -> list[float]:
    """Rates from low to high, evenly spaced by their logarithm, both ends included."""
    count = max(2, 1 + math.ceil(math.log10(high / low) * per_decade - 1e-9))
    return [low * (high / low) ** (number / (count - 1)) for number in range(count)]


def sweep(
    config: RunConfig[Any], world: World, rates: list[float], num_steps: int, say: Callable[[str], None]
) -> Iterator[Trial]:
    """Train `num_steps` at each rate, with the run's own batch size; yields the losses. All ranks together.

    The rate warms up over the first fifth of the steps and then stays. Each trial starts from the weights that the run
    itself would start from: the newest checkpoint in its folder, a folder or base model that it names, or random ones.
    """
    trainer = make_trainer(config, world, draw_weights=False)
    trainer.bad_steps.stop_watching()
    checkpoints = CheckpointManager(
        config.job.dump_folder,
        interval=1,
        keep_latest_k=0,
        say=say,
        sign_key=read_key(config.checkpoint.sign_key_file),
        elsewhere=config.checkpoint.folder,
    )
    newest = checkpoints.latest() if has_own_checkpoint(config) else None
    for lr in rates:
        initialize_buffers(trainer.model)
        if config.lora.rank:
            load_base(trainer.model, config)
        if newest is not None:
            checkpoints.load(newest, trainer.model, None)
        elif config.checkpoint.initial_load_path:
            load_initial_weights(trainer)
        else:
            initialize_parameters(trainer.model, config.training.seed, only_adapters=bool(config.lora.rank))
        weights_changed(trainer.model)
        trying = _with_rate(trainer, lr, num_steps)
        losses = list(_losses(trying))
        trying.bad_steps.stop_watching()
        yield Trial(lr, losses, num_steps)


def _with_rate(trainer: Trainer, lr: float, num_steps: int) -> Trainer:
    config = replace(
        trainer.config,
        optimizer=replace(trainer.config.optimizer, lr=lr),
        lr_scheduler=LRScheduler(warmup_steps=num_steps // 5, decay_ratio=0.0),
        training=replace(trainer.config.training, steps=num_steps),
    )
    optimizer = build_optimizer(trainer.model, config.optimizer)
    return Trainer(config, trainer.world, trainer.data, trainer.model, optimizer, trainer.loss_sum, trainer.timer)


def _losses(trainer: Trainer) -> Iterator[float]:
    first = math.inf
    for step in range(1, trainer.config.training.steps + 1):
        loss = trainer.step(step).loss.item()  # the same on all ranks
        if not loss <= HOPELESS * first and step > 1:
            return
        first = loss if step == 1 else first
        yield loss


def suggest(trials: list[Trial]) -> Suggestion | None:
    """The rate to start with; None if no rate lowered the loss."""
    finished = [trial for trial in trials if not trial.diverged]
    if not finished:
        return None
    best = min(finished, key=lambda trial: trial.loss)
    if not best.loss < best.losses[0]:
        return None
    chosen = next(trial for trial in sorted(finished, key=lambda trial: trial.lr) if _as_good(trial, best))
    at_edge = (
        "lower" if best.lr == min(t.lr for t in trials) else "upper" if best.lr == max(t.lr for t in trials) else ""
    )
    return Suggestion(chosen.lr, best.lr, at_edge)


def _as_good(trial: Trial, best: Trial) -> bool:
    """Whether a rate's losses equal the best rate's up to noise: batch by batch, as both saw the same batches."""
    differences = [mine - other for mine, other in zip(trial.end(), best.end(), strict=True)]
    if len(differences) < 3:
        return trial is best
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    # Over a few steps, the standard error is itself noisy and may be too large to tell rates apart: never more than a
    # small share of the progress counts as noise.
    progress = best.losses[0] - best.loss
    return statistics.fmean(differences) <= min(STANDARD_ERRORS * error, MOST_NOISE * progress)
