"""This rank's shards of parameters, gradients and optimizer state."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor, which shares its memory; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(parameter: Tensor) -> Tensor:
    """The shard of a parameter's gradient."""
    gradient = parameter.grad
    assert gradient is not None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        # FSDP2 has it sharded like the parameter; elsewhere it may still be a partial sum on each rank.
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)
