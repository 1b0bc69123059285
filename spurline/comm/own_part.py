"""This rank's shard of a tensor: its indices, and setting it from the full value."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def own_indices(tensor: Tensor) -> list[Tensor]:
    """For each dim of the full tensor, the indices along it of this rank's shard, in order.

    FSDP2 shards a dim after tensor or expert parallelism has, although its axis comes first in the mesh: DTensor calls
    that a strided shard.
    """
    indices = [torch.arange(size) for size in tensor.shape]
    if not isinstance(tensor, DTensor):
        return indices
    shards = [
        (not isinstance(placement, Shard), axis, placement.dim)  # type: ignore[attr-defined]
        for axis, placement in enumerate(tensor.placements)
        if not isinstance(placement, Replicate)
    ]
    for _is_strided, axis, dim in sorted(shards):
        num_ranks, rank = tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis)
        largest = -(-indices[dim].numel() // num_ranks)
        indices[dim] = indices[dim][rank * largest : (rank + 1) * largest]
    shape, held = tuple(index.numel() for index in indices), tuple(tensor.to_local().shape)
    assert shape == held, f"expected {shape} of {tensor.placements} on this rank, which holds {held}"
    return indices


def keep_own_part(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter, or this rank's shard of it, from its full value."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    for dim, index in enumerate(own_indices(parameter)):
        whole = whole.index_select(dim, index.to(whole.device))
    parameter.to_local().copy_(whole)
    note_new_value(parameter)


def note_new_value(parameter: Tensor) -> None:
    """Bump the version of a DTensor, which does not notice in-place writes to its local tensor."""
    if isinstance(parameter, DTensor):
        torch.autograd.graph.increment_version(parameter)
