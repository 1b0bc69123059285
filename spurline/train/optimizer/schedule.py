"""The learning-rate schedule, and how it is applied to the parameter groups."""

import math

import torch

from spurline.config import LRScheduler


def learning_rate(step: int, total_steps: int, peak: float, schedule: LRScheduler) -> float:
    """The learning rate of step `step`, counted from 1: the step about to be taken, of `total_steps`.

    It warms up from peak / warmup_steps to the peak at step warmup_steps, stays, and decays over the last decay_ratio
    of the steps to min_lr_factor * peak at the last one. Decay waits for the warmup to end: if the two overlap, the
    warmup continues and the decay is shorter and steeper.
    """
    assert 1 <= step <= total_steps, f"step {step} is not one of 1..{total_steps}"
    if step < schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    last_step_at_peak = max(schedule.warmup_steps, total_steps - round(total_steps * schedule.decay_ratio))
    if step <= last_step_at_peak:
        return peak
    progress = (step - last_step_at_peak) / (total_steps - last_step_at_peak)
    height = {
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
        "sqrt": 1 - math.sqrt(progress),
    }[schedule.decay_type]
    return peak * (schedule.min_lr_factor + (1 - schedule.min_lr_factor) * height)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of each parameter group to `lr` times its own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)
