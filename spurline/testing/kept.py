"""Measure what is kept for backward: storages that a forward allocated and that are still alive."""

import time
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Tracks storages allocated inside the block that are still alive, except those of `model`'s own tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        own = [getattr(t, "_local_tensor", t) for t in [*model.parameters(), *model.buffers()]]  # DTensors
        self.own = {t.untyped_storage()._cdata for t in own}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.own:
                    self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def sizes(self) -> list[int]:
        """Bytes of each live storage, sorted."""
        return sorted(num_bytes for storage, num_bytes in self.made.values() if not storage.expired())

    def settled_sizes(self, seconds: float = 0.5) -> list[int]:
        """The sizes once they are stable for this long: gloo's threads release received buffers with a delay."""
        sizes, since = self.sizes(), time.monotonic()
        while time.monotonic() - since < seconds:
            time.sleep(0.02)
            if (now := self.sizes()) != sizes:
                sizes, since = now, time.monotonic()
        return sizes

    def num_bytes(self) -> int:
        return sum(self.sizes())


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter)
