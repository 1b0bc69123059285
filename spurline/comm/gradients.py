"""Gradient reduction: which gradient is summed over which ranks, and by what. Decided here and in `parallel/fsdp.py`.

| weight | its gradient on a rank covers | summed over ranks by |
| --- | --- | --- |
| under FSDP2: everything the trainer trains | this rank's tokens | FSDP2, over its mesh |
| replicated over an axis of its DTensor (tp, etp) | this rank's positions or heads | `local`, over that axis |
| plain, after `parallelize_moe` of a bare layer | this rank's tokens | `sum_over_group`, a hook |
| sharded over ep or etp: experts | all rows that reached this rank | nothing: it is complete |
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spurline.comm.collectives import all_reduce_gradient, copy_to_group


def local(weight: Tensor) -> Tensor:
    """This rank's shard of a weight as a plain tensor: called once, at the start of the module that uses it.

    The ranks of an axis over which a weight is replicated see different tokens, or different heads of the same tokens:
    each computes a partial gradient, and the backward pass sums them.
    """
    if not isinstance(weight, DTensor):
        return weight
    part = weight.to_local()
    for axis, placement in enumerate(weight.placements):
        if placement.is_replicate():
            part = copy_to_group(part, weight.device_mesh.get_group(axis))
    return part


def sum_over_group(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Register hooks that sum the gradients of these parameters over the group, once per backward pass."""
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: all_reduce_gradient(gradient, group))
