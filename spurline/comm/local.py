"""Where a parameter leaves the world of DTensors: once, at the top of the module that uses it."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline.comm.collectives import copy_to_group


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight, as a plain tensor.

    An axis over which a weight is replicated is one whose ranks see different tokens, or different heads of the same
    ones: each has only its part of the gradient, and the backward pass sums them.
    """
    if not isinstance(weight, DTensor):
        return weight
    part = weight.to_local()
    for axis, placement in enumerate(weight.placements):
        if placement.is_replicate():
            part = copy_to_group(part, weight.device_mesh.get_group(axis))
    return part
