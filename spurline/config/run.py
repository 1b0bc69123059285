"""The configuration of a run: all sections together."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from spurline.config.checks import not_finite
from spurline.config.data import Data
from spurline.config.layout import ActivationCheckpoint, Comm, Compile, Parallelism
from spurline.config.lora import Lora
from spurline.config.model import ModelConfig
from spurline.config.output import Checkpoint, Debug, Job, Metrics, Profile
from spurline.config.precision import Precision
from spurline.config.training import LRScheduler, Optimizer, Training
from spurline.typed_json import ADDED_LATER

M = TypeVar("M", bound=ModelConfig)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Generic[M]):
    """Everything a run depends on. Stored as `config.json`, which reproduces the run.

    Sections are in the order of `--help`; the model comes last because it has the most options.
    """

    job: Job = field(default_factory=Job)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    lora: Lora = field(default_factory=Lora, metadata=ADDED_LATER)
    parallelism: Parallelism = field(default_factory=Parallelism)
    comm: Comm = field(default_factory=Comm, metadata=ADDED_LATER)
    compile: Compile = field(default_factory=Compile)
    precision: Precision = field(default_factory=Precision, metadata=ADDED_LATER)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    data: Data = field(default_factory=Data)
    metrics: Metrics = field(default_factory=Metrics)
    profile: Profile = field(default_factory=Profile)
    debug: Debug = field(default_factory=Debug)
    model: M

    def problems(self) -> list[str]:
        """All validation errors, each prefixed with its option."""
        found: list[str] = []
        for section in dataclasses.fields(self):
            value = getattr(self, section.name)
            names = {f.name for f in dataclasses.fields(value)}
            for problem in not_finite(value) or value.problems():
                about_an_option = problem.split(" ", 1)[0].split(".")[0] in names
                found.append(f"{section.name}.{problem}" if about_an_option else f"{section.name}: {problem}")
        if self.data.kind == "pictures" and not hasattr(self.model, "vision"):
            found.append("data.kind pictures needs a model with a vision encoder, such as --module qwen3_vl")
        moe = getattr(self.model, "moe", None)
        if self.compile.enable and "model" in self.compile.parts and not getattr(moe, "can_compile", True):
            name = getattr(moe, "dispatcher", "")
            found.append(
                f"compile.enable with model: dispatcher {name!r} calls a library that can't be traced: choose"
                " --compile.components loss, or dispatcher 'local' or 'capacity'"
            )
        if self.lora.rank and self.checkpoint.initial_load_path:
            found.append("checkpoint.initial_load_path is not for runs with adapters: give the folder as lora.base")
        if self.checkpoint.keep_best and not (self.metrics.validation_batches and self.data.validation_fraction):
            found.append(
                "checkpoint.keep_best needs a validation loss: set metrics.validation_batches and"
                " data.validation_fraction above 0"
            )
        found += self._pipeline_problems()
        if self.training.on_loss_spike == "step_back" and not self.checkpoint.enable:
            found.append("training.on_loss_spike step_back needs checkpoints: set checkpoint.enable")
        local, total = self.training.local_batch_size, self.training.global_batch_size
        if local > 0 and total > 0 and total % local:
            found.append(f"training.global_batch_size {total} is not a multiple of training.local_batch_size {local}")
        return found

    def _pipeline_problems(self) -> list[str]:
        """Errors for options that can't be combined with pipeline parallelism."""
        parallelism = self.parallelism
        if parallelism.pipeline_parallel_degree <= 1:
            return []
        schedule = f"parallelism.pipeline_parallel_schedule {parallelism.pipeline_parallel_schedule}"
        found = []
        if parallelism.pipeline_parallel_schedule in ("InterleavedZeroBubble", "ZBV", "DualPipeV"):
            passes = "computes gradients of inputs and of weights in two passes, which"
            if self.compile.enable and "model" in self.compile.parts:
                found.append(f"{schedule} {passes} compiled blocks can't: use 1F1B or Interleaved1F1B")
            if self.activation_checkpoint.mode != "none":
                found.append(
                    f"{schedule} {passes} would recompute each block twice: use 1F1B or Interleaved1F1B, or"
                    " activation_checkpoint.mode none"
                )
        if parallelism.fsdp_reduce_each_micro_batch:
            found.append(
                "parallelism.fsdp_reduce_each_micro_batch is not for pipeline stages, which reduce gradients at the end"
                " of a step"
            )
        return found
