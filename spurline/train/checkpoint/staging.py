"""Copies of a state in host memory, from which a checkpoint is written while training continues."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Copies a state to host memory, into buffers that are reused."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state, sharded in the same way, that training does not change."""
        copied = {name: self._copy(name, item) if isinstance(item, Tensor) else item for name, item in state.items()}
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return copied

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
            pinned = local.device.type != "cpu"
            buffer = self._buffers[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
        buffer.copy_(local, non_blocking=True)
        # `DTensor.from_local` would move the copy to the mesh's device.
        return DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
