"""A fingerprint of weights that depends on their values alone: not on files, storage dtypes or sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline.train.checkpoint.ranks import Ranks

_CHUNK = 1 << 22


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """32 hexadecimal digits, the same on all ranks, which must call this together.

    For each tensor, the float32 bit patterns of its elements, and their squares, are summed as integers: exact in any
    order. So the sums of shards add up over ranks; a replicated shard is counted by the first rank that holds it. Ranks
    of different pipeline stages have different tensors.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    first_rank: dict[str, int] = {}
    for rank, own in enumerate(Ranks().gather(lambda: {name: tuple(tensors[name].shape) for name in tensors})):
        for name, shape in own.items():
            shapes.setdefault(name, shape)
            first_rank.setdefault(name, rank)
    names = sorted(shapes)
    none = torch.zeros(2, dtype=torch.int64)
    counted = {name for name in tensors if _is_counted(tensors[name], first_rank[name])}
    sums = torch.stack([_sums(tensors[name]) if name in counted else none for name in names])
    if dist.is_initialized():
        on_device = sums.to(next(iter(tensors.values())).device)
        dist.all_reduce(on_device)
        sums = on_device.cpu()
    return _digest({name: shapes[name] for name in names}, sums)


def fingerprint_by_name(shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]) -> str:
    """The same for full tensors in one process, read one at a time."""
    names = sorted(shapes)
    return _digest({name: shapes[name] for name in names}, torch.stack([_sums(read(name)) for name in names]))


def _digest(shapes: Mapping[str, tuple[int, ...]], sums: Tensor) -> str:
    lines = [f"{name} {shape} {values}" for (name, shape), values in zip(shapes.items(), sums.tolist(), strict=True)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _sums(tensor: Tensor) -> Tensor:
    part = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().flatten()
    total = torch.zeros(2, dtype=torch.int64, device=part.device)
    for chunk in part.split(_CHUNK):
        bits = chunk.to(torch.float32).view(torch.int32).to(torch.int64)
        total += torch.stack([bits.sum(), (bits * bits).sum()])  # overflow wraps around, the same in any order
    return total.cpu()


def _is_counted(tensor: Tensor, first_rank: int) -> bool:
    """Whether this rank is the first of those that hold the same shard; first_rank is the first to hold any."""
    if not dist.is_initialized():
        return True
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == first_rank
    if first_rank not in tensor.device_mesh.mesh:  # a copy, such as that of a tied embedding on the last stage
        return False
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate())
