"""AdamW on this rank's shards."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline.train.optimizer.shards import local, local_gradient


class ShardedAdamW(torch.optim.AdamW):
    """torch.optim.AdamW, but DTensors are updated as the plain tensors that they are on this rank.

    Every element is updated by itself, so the result is the same. With DTensors, PyTorch first works out how the update
    of all parameters together is sharded: in the first step, that takes the host 0.1 s for 50 parameters and 2.1 s for
    500, instead of 0.003 and 0.05 s. State stays in DTensors, as checkpoints expect.
    """

    def _init_group(self, group: dict[str, Any], params_with_grad: list[Tensor], *lists: list[Tensor]) -> bool:
        has_complex: bool = super()._init_group(group, params_with_grad, *lists)
        grads, *state = lists
        grads[:] = [local_gradient(p) for p in params_with_grad]
        # Local tensors have version counters of their own, which nobody reads.
        torch.autograd.graph.increment_version([p for p in params_with_grad if isinstance(p, DTensor)])
        for tensors in (params_with_grad, *state):
            tensors[:] = [local(tensor) for tensor in tensors]
        return has_complex
