"""The few values that the simulated device must provide: row counts, token counts, indices.

The experts of tokens are known (`routing.py`), and so are copies from the host and integer ranges. An op whose inputs
are all known is also computed on the host. So the host reads realistic values, whichever code path the simulated code
takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

MOST = 1 << 22
"""Maximum number of elements of a tensor whose values are kept."""
_FACTORIES = {"arange", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones"}
_SKIPPED_NAMESPACES = {"spurline", "c10d", "_c10d_functional", "profiler", "fsdp"}


class Values:
    """Host copies of the known values of device tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of = WeakIdKeyDictionary()

    def get(self, tensor: Tensor) -> Tensor | None:
        """The values of a tensor, if they are known."""
        return self._of.get(tensor)

    def set(self, tensor: Tensor, value: Tensor) -> None:
        if tensor.numel() <= MOST:
            self._of[tensor] = value

    def read(self, tensor: Tensor) -> Tensor:
        """The values that the host reads from a tensor; unknown ones are 0 (floating point), 1 (integer) or True."""
        if (known := self.get(tensor)) is not None:
            return known.clone()
        return torch.full(tensor.shape, 0 if tensor.is_floating_point() else 1, dtype=tensor.dtype)

    def follow(self, op: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Run an op on the known values of its arguments, and keep the values of its results."""
        if op.namespace in _SKIPPED_NAMESPACES:
            return
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = [tensor for tensor in inputs if tensor.device == self.device]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not outputs or any(output.numel() > MOST for output in outputs):
            return self._forget(op, on_device)
        is_factory = op.overloadpacket.__name__ in _FACTORIES
        if is_factory:
            if outputs[0].is_floating_point() or outputs[0].device != self.device:
                return None
        elif not on_device or not all(tensor in self._of for tensor in on_device):
            return self._forget(op, on_device)
        try:
            values = op(*tree_map(self._value, args), **tree_map(self._value, kwargs))
        except (RuntimeError, NotImplementedError, TypeError):  # not implemented for real tensors of this kind
            return self._forget(op, on_device)
        for output, value in zip(outputs, [v for v in tree_leaves(values) if isinstance(v, Tensor)], strict=True):
            if output.device == self.device:
                self.set(output, value)
        return None

    def _forget(self, op: Any, tensors: list[Tensor]) -> None:
        """Drop the values of tensors that an op may have written to."""
        if op._schema.is_mutable:
            for tensor in tensors:
                self._of.pop(tensor, None)

    def _value(self, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == self.device:
            return self._of[leaf] if leaf in self._of else torch.empty(leaf.shape, dtype=leaf.dtype)
        if isinstance(leaf, torch.device) and leaf == self.device:
            return torch.device("cpu")
        return leaf
