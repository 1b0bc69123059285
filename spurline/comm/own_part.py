"""The indices of this rank's shard of a tensor."""

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
