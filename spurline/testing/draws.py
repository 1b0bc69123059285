"""Count the random numbers that are drawn."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class CountDraws(TorchDispatchMode):
    """`with CountDraws() as draws:` makes `draws.num_drawn` the number of random numbers drawn inside."""

    num_drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # A tensor on the meta device has no numbers.
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, Tensor) and not out.is_meta:
            self.num_drawn += out.numel()
        return out
