"""Where a parameter leaves the world of DTensors: once, at the top of the module that uses it."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(weight: Tensor) -> Tensor:
    """This rank's part of a weight, as a plain tensor."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
