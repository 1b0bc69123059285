"""The parts of a preset that don't depend on the family: how a model of some size is trained. No torch import."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeVar

from spurline.config import (
    ActivationCheckpoint,
    Checkpoint,
    LRScheduler,
    ModelConfig,
    Optimizer,
    Parallelism,
    RunConfig,
    Training,
)

M = TypeVar("M", bound=ModelConfig)


def debug_run(model: M) -> RunConfig[M]:
    """A run of a few seconds on a CPU in which the loss clearly falls."""
    return RunConfig(
        model=model,
        training=Training(steps=60, seq_len=128, local_batch_size=8),
        optimizer=Optimizer(lr=3e-3),
        lr_scheduler=LRScheduler(warmup_steps=5, decay_ratio=0.5),
    )


def full_size_run(
    model: M, lr: float, seq_len: int = 4096, recompute: Literal["selective", "full"] = "selective"
) -> RunConfig[M]:
    """A starting point for many GPUs: bfloat16, one sequence per rank, activation checkpointing."""
    return RunConfig(
        model=model,
        training=Training(steps=10_000, seq_len=seq_len, local_batch_size=1, dtype="bfloat16"),
        optimizer=Optimizer(lr=lr),
        lr_scheduler=LRScheduler(warmup_steps=500, decay_ratio=0.2, min_lr_factor=0.1),
        activation_checkpoint=ActivationCheckpoint(mode=recompute),
        checkpoint=Checkpoint(interval=500),
    )


def spread_experts(run: RunConfig[M], expert_parallel: int, resend_rows: bool = False) -> RunConfig[M]:
    """The run with its experts spread over `expert_parallel` ranks, to fit the devices listed in docs/planning.md.

    resend_rows: for models whose dispatched rows would not fit in memory if they were all kept.
    """
    mode = replace(run.activation_checkpoint, mode="selective_resend") if resend_rows else run.activation_checkpoint
    return replace(run, parallelism=Parallelism(expert_parallel_degree=expert_parallel), activation_checkpoint=mode)
