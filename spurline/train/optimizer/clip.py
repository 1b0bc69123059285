"""Gradient clipping by the joint norm of all gradients, sharded or not."""

import math
from collections.abc import Container, Iterable
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from spurline.train.optimizer.shards import local


@torch.no_grad()
def gradient_norms(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The norms (P,) of this rank's shards of all gradients that exist, in the order of the parameters."""
    parameters = list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    parts = [local(gradient) for gradient in gradients]
    return torch.stack(torch._foreach_norm(parts)) if parts else torch.zeros(0, device=parameters[0].device)


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    group: ProcessGroup | None = None,
    norms_P: Tensor | None = None,
    num_sharers: int | None = None,
    counted_elsewhere: Container[nn.Parameter] = (),
) -> Tensor:
    """Scale all gradients so that their joint norm is at most `max_norm` (0: leave them), and return the norm before.

    Gradients that are sharded over the ranks of `group` count in full, and the norm is the same on all of them. A norm
    that isn't finite is returned, not raised: the caller decides what to do about such a step. `norms_P` is the result
    of `gradient_norms`, if the caller has it already. If ranks have different parameters, as pipeline stages do,
    `num_sharers` of them have the same ones; those in `counted_elsewhere` are scaled here, but counted by other ranks.
    """
    parameters = list(parameters)
    with_gradients = [p for p in parameters if p.grad is not None]
    gradients = [p.grad for p in with_gradients if p.grad is not None]
    parts = [local(gradient) for gradient in gradients]
    norms = gradient_norms(parameters) if norms_P is None else norms_P
    if group is None:
        norm = torch.linalg.vector_norm(norms)
    else:
        # A replicated shard is counted by every rank that holds it.
        sharers = num_sharers or group.size()
        holders = tuple(
            math.inf if p in counted_elsewhere else sharers / _num_parts(g)
            for p, g in zip(with_gradients, gradients, strict=True)
        )
        squares = (norms.square() / _on_device(holders, norms.dtype, norms.device)).sum()
        torch.distributed.all_reduce(squares, group=group)
        norm = squares.sqrt()
    if max_norm > 0 and parts:
        torch._foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@lru_cache(maxsize=8)
def _on_device(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cached, because copying a list to an accelerator makes the host wait."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def _num_parts(gradient: Tensor) -> int:
    """The number of shards of a gradient."""
    assert isinstance(gradient, DTensor), "a gradient that no mesh knows of can't be counted"
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())
