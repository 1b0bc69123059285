"""AdamW with decay on matrices only, its learning-rate schedule, and gradient clipping."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from spurline.config import LRScheduler, Optimizer


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.AdamW:
    """AdamW over the trainable parameters in the model's order: first the group that decays, then the one that doesn't.

    Whatever has two dims or more decays (embeddings, gates and stacked experts too); norms and biases don't.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Left to itself, torch updates CPU parameters one small operation at a time, many times slower.
    fused_devices = _get_fused_kernels_supported_devices()
    fused = all(p.device.type in fused_devices for p in parameters)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)


def learning_rate(step: int, total_steps: int, peak: float, schedule: LRScheduler) -> float:
    """The rate of step `step`, counted from 1: the step about to be taken, of `total_steps`.

    It climbs from peak / warmup_steps to the peak at step warmup_steps, stays, and falls over the last decay_ratio of
    the steps to min_lr_factor * peak at the last one. Decay waits for the warm-up to end: where the two overlap, the
    warm-up goes on and the fall is shorter and steeper.
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
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, group: ProcessGroup | None = None) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm` (0: leave them), and return the norm before.

    Gradients that are sharded over the ranks of `group` count in full, and the norm is the same on all of them. A norm
    that isn't finite is returned, not raised: the caller decides what to do about such a step.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norms = torch.stack(torch._foreach_norm(parts))
    if group is None:
        norm = torch.linalg.vector_norm(norms)
    else:
        # A part that several ranks hold is counted by each of them.
        holders = norms.new_tensor([group.size() / _num_parts(g) for g in gradients])
        squares = (norms.square() / holders).sum()
        torch.distributed.all_reduce(squares, group=group)
        norm = squares.sqrt()
    if max_norm > 0:
        torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _num_parts(gradient: Tensor) -> int:
    """Into how many parts a gradient is cut."""
    assert isinstance(gradient, DTensor), "a gradient that no mesh knows of can't be counted"
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())
