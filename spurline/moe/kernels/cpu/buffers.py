"""A memory pool for large CPU tensors that are allocated and freed in every step.

The system allocator returns large freed blocks to the OS, and new ones cost a fault per page: for weight gradients
and saved activations, that costs up to a tenth of the arithmetic. A block of the pool returns to a free list when the
last tensor that uses it is freed, and is reused from there. No two live tensors share memory.
"""

from __future__ import annotations

import math
import os
import weakref
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Block = npt.NDArray[np.uint8]

SMALLEST = 1 << 20
"""Size in bytes below which the allocator's own free lists are good enough."""
_ALIGNMENT = 64


def _eighth_of_memory() -> int:
    if not hasattr(os, "sysconf"):
        return 1 << 30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


class BufferPool:
    """Reusable large blocks of host memory; at most `limit` bytes are held unused."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.unused_bytes = 0
        self._free: defaultdict[int, list[Block]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized contiguous tensor of that shape, on the device and by default in the dtype of `like`."""
        dtype = dtype or like.dtype
        num_bytes = math.prod(shape) * dtype.itemsize
        if like.device.type != "cpu" or num_bytes < SMALLEST:
            return torch.empty(shape, dtype=dtype, device=like.device)
        block = self._take(_round_up(num_bytes) + _ALIGNMENT)
        start = -block.ctypes.data % _ALIGNMENT
        # Only the tensor's storage holds this view: when it is freed, so is the block.
        view = block[start : start + num_bytes]
        weakref.finalize(view, self._return, block).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def release(self) -> None:
        """Return unused blocks to the system."""
        self._free.clear()
        self.unused_bytes = 0

    def _take(self, size: int) -> Block:
        if self._free[size]:
            self.unused_bytes -= size
            return self._free[size].pop()
        return np.empty(size, np.uint8)

    def _return(self, block: Block) -> None:
        if self.unused_bytes + block.size <= self.limit:
            self.unused_bytes += block.size
            self._free[block.size].append(block)


def _round_up(num_bytes: int) -> int:
    """Round up to one of eight sizes per power of two, so that a block fits the slightly different next step."""
    step = 1 << max(num_bytes.bit_length() - 4, 12)
    return -(-num_bytes // step) * step


POOL = BufferPool(_eighth_of_memory())
"""The pool of this process."""
