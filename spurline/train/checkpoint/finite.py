"""Whether tensors have only finite values, in one pass over them and without a copy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def non_finite_names(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of tensors whose local shard has an infinity or a NaN; one host read per device if none."""
    named = [
        (name, tensor.to_local() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in tensors
        if tensor.is_floating_point()
    ]
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:  # an optimizer may keep its step counts on the host
        by_device.setdefault(tensor.device, []).append((name, tensor))
    return [name for of_device in by_device.values() for name in _non_finite_names(of_device)]


def _non_finite_names(named: list[tuple[str, Tensor]]) -> list[str]:
    """The same for tensors of one device."""
    finite = torch.stack([_sum(tensor) for _, tensor in named]).isfinite()
    if finite.all():
        return []
    # The sum of finite values may overflow, so look at each value where the sum is not finite.
    suspects = [named[i] for i in finite.logical_not().nonzero().flatten().tolist()]
    return [name for name, tensor in suspects if not _as_float(tensor).isfinite().all()]


def is_finite(tensor: Tensor) -> bool:
    return not non_finite_names([("", tensor)])


def _sum(tensor: Tensor) -> Tensor:
    # A sum with an infinity or a NaN in it is never finite.
    return _as_float(tensor.detach()).sum(dtype=torch.float32 if tensor.dtype != torch.float64 else None).float()


def _as_float(tensor: Tensor) -> Tensor:
    """Cast 8-bit types to float32: they have no sum."""
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor
