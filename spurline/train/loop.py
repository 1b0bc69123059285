"""The training loop: step, log, save, stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from spurline.config import RunConfig
from spurline.moe.dispatch.capacity import capacity_factors
from spurline.train.agreement import Agreement
from spurline.train.checkpoint.manager import CheckpointManager
from spurline.train.garbage import collecting_every
from spurline.train.metrics.logger import MetricsLogger
from spurline.train.metrics.step_metrics import StepMetrics
from spurline.train.metrics.tally import diverged
from spurline.train.position import Position
from spurline.train.profiling import make_profiler
from spurline.train.replicas import ReplicaCheck
from spurline.train.save_clock import SaveClock
from spurline.train.step_back import SpikeWatch
from spurline.train.stop_signal import StopSignal
from spurline.train.trainer import Trainer
from spurline.train.validation import Validation, has_validation, validate
from spurline.train.watchdog import STEP


def last_step(config: RunConfig[Any]) -> int:
    """The step after which the run ends."""
    return min(config.debug.stop_after or config.training.steps, config.training.steps)


class TrainingLoop:
    """Takes the remaining steps of a run. All ranks do everything in the same order.

    A step is saved after its metrics were written, also between the steps that are logged: a run that is killed in
    between repeats the step and writes it again, so that no line is missing and nothing that is counted is lost.
    """

    def __init__(
        self,
        trainer: Trainer,
        logger: MetricsLogger,
        checkpoints: CheckpointManager,
        stop_signal: StopSignal,
        position: Position,
        spikes: SpikeWatch,
        mark: Callable[[int, str], None] = lambda step, phase: None,
        write_sample: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`mark` is called when a phase of a step begins, `write_sample` when a sample is due."""
        self.trainer, self.logger, self.checkpoints = trainer, logger, checkpoints
        self.stop_signal, self.position, self.mark = stop_signal, position, mark
        self.write_sample = write_sample
        self.config = config = trainer.config
        self.last_step = last_step(config)
        self.profiler = make_profiler(trainer)
        self.replicas = ReplicaCheck(trainer.model, trainer.world, config.debug.check_replicas_interval)
        self.spikes = spikes
        self.spike_began = 0
        """The first step of a loss spike to roll back, which ends the loop; 0: none; negative: after too many."""
        self.agreement = Agreement(trainer.world.host_group)
        self.stopped_by = 0  # the signal that any rank has received
        self.clock = SaveClock(config.checkpoint.interval_minutes if trainer.world.is_first else 0)
        self.is_time_to_save = False  # by the first rank's clock

    @property
    def is_finished(self) -> bool:
        return self.position.step >= self.last_step

    def run(self) -> None:
        """Take steps until the last one, a signal, or a loss spike that is to be rolled back."""
        steps = range(self.position.step + 1, self.last_step + 1)
        with self.trainer.prefetching(steps), collecting_every(self.config.training.gc_freq) as collect_garbage:
            for step in steps:
                metrics = self.step(step)
                held_out = self.validate() if self.is_validation_due(step) else None
                logged_loss = self.logger.log(metrics, held_out) if self.is_log_due(step) else None
                loss = None if held_out is None else held_out.loss
                if self.is_sample_due(step):
                    self.sample(step)
                self.refuse_unless_finite(step, loss)
                spike_began = self.spikes.wants_step_back(step, logged_loss, self.checkpoints.latest)
                stopping = self.should_stop(spike_began)
                if self.spike_began < 0:
                    raise self.spikes.too_many(-self.spike_began)
                if self.spike_began:
                    break
                saving = self.is_save_due(step) or (
                    (stopping or self.is_time_to_save) and self.config.checkpoint.enable
                )
                self.replicas.check(step, saving)
                if saving:
                    if logged_loss is None:  # what is counted since the last line is not in the checkpoint
                        self.logger.log(replace(metrics, may_grow=False), held_out)
                    self.save(step, loss)
                if stopping and step < self.last_step:
                    break
                collect_garbage(step)
        self.mark(self.position.step, "end")
        if self.profiler:
            self.profiler.finish()
        self.agreement.finish()
        self.replicas.finish()
        self.trainer.tally.read()
        self.checkpoints.wait()

    def step(self, step: int) -> StepMetrics:
        self.mark(step, STEP)
        with self.trainer.timer.step(), self.profiler.step(step) if self.profiler else nullcontext():
            metrics = self.trainer.step(step)
        self.position = self.trainer.position_after(step)
        return metrics

    def is_validation_due(self, step: int) -> bool:
        """At the last step, every validation_interval and, with keep_best, at each checkpoint."""
        interval = self.config.metrics.validation_interval
        for_checkpoint = self.config.checkpoint.keep_best and self.is_save_due(step)
        due = step == self.last_step or bool(interval and step % interval == 0) or for_checkpoint
        return due and has_validation(self.trainer)

    def validate(self) -> Validation | None:
        self.mark(self.position.step, "validation")
        with self.logger.throughput.paused():
            return validate(self.trainer)

    def is_sample_due(self, step: int) -> bool:
        """Every sample_interval except at the last step, whose sample is written when the run is finished."""
        metrics = self.config.metrics
        interval = metrics.sample_interval if metrics.sample_tokens else 0
        return bool(interval and step % interval == 0 and step < self.last_step)

    def sample(self, step: int) -> None:
        self.mark(step, "sample")
        with self.logger.throughput.paused():
            self.write_sample(step)

    def refuse_unless_finite(self, step: int, loss: float | None) -> None:
        if loss is not None and not math.isfinite(loss):
            raise diverged(self.config, step, f"the validation loss is {loss}")

    def is_log_due(self, step: int) -> bool:
        return self.is_validation_due(step) or step == self.last_step or step % self.config.metrics.log_interval == 0

    def is_save_due(self, step: int) -> bool:
        return self.config.checkpoint.enable and self.checkpoints.is_due(step, self.last_step)

    def save(self, step: int, loss: float | None) -> None:
        """Write a checkpoint of a step that was logged."""
        self.mark(step, "checkpoint")
        with self.logger.throughput.paused():
            self.position = self.trainer.position_after(step)
            extra = {**self.position.stored(), "validation_loss": loss, "run": self.trainer.fingerprint()}
            if factors := capacity_factors(self.trainer.model, self.trainer.world.pipeline_group):
                extra["capacity_factors"] = factors
            extra |= self.trainer.base
            self.checkpoints.save(step, self.trainer.model, self.trainer.optimizer, extra)
        self.clock.restart()

    def should_stop(self, spike_began: int = 0) -> bool:
        """Whether a signal has reached any rank; raises the error of a checkpoint that failed in the background.

        With several ranks, they all learn of a signal one step later; likewise of a loss spike, which the first rank
        detects, and of its save clock.
        """
        self.stopped_by, failed, began, began_again, is_time = self.agreement.exchange(
            *(self.stop_signal.received, self.checkpoints.failed, max(0, spike_began), max(0, -spike_began)),
            self.clock.rings(),
        )
        self.is_time_to_save = bool(is_time)
        self.spike_began = began - began_again
        if failed:
            self.checkpoints.wait()
        if self.stopped_by:  # leave a spike to the next start
            self.spike_began = 0
        return self.stopped_by != 0
