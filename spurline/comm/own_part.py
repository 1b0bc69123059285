"""Which part of a sharded tensor this rank holds."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard


def own_indices(tensor: Tensor) -> list[Tensor]:
    """For each dim of the whole tensor, the indices along it of what this rank holds, in order.

    FSDP2 shards what tensor or expert parallelism has left of a dim, although its axis comes first in the mesh: DTensor
    calls that a strided shard.
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
