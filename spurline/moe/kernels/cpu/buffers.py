"""Memory for large CPU tensors that come and go with every step.

The system takes large freed blocks back from a process and hands out pages one fault at a time: for weight gradients
and for what is kept for a backward pass, that costs as much as a tenth of the arithmetic. Blocks from here go to a list
when the last tensor that uses them is gone, and from there to the next caller. Nothing is shared between two tensors
that live.
"""

import math
import os
import weakref
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Block = npt.NDArray[np.uint8]

_SMALLEST = 1 << 20
"""Bytes below which the allocator's own lists do well."""
_ALIGNMENT = 64
_free: defaultdict[int, list[Block]] = defaultdict(list)
_free_bytes = 0


def _limit() -> int:
    """Bytes that may lie unused: an eighth of the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8


_LIMIT = _limit() if hasattr(os, "sysconf") else 1 << 30


def empty(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialized contiguous tensor of that shape, on the device and by default in the dtype of `like`."""
    dtype = dtype or like.dtype
    num_elements = math.prod(shape)
    num_bytes = num_elements * dtype.itemsize
    if like.device.type != "cpu" or num_bytes < _SMALLEST:
        return torch.empty(shape, dtype=dtype, device=like.device)
    block = _take(_round_up(num_bytes) + _ALIGNMENT)
    start = -block.ctypes.data % _ALIGNMENT
    # The tensor's storage holds this view and nothing else does: when it dies, the block is free.
    view = block[start : start + num_bytes]
    weakref.finalize(view, _give_back, block).atexit = False
    return torch.from_numpy(view).view(dtype).view(shape)


def zeros(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return empty(shape, like, dtype).zero_()


def unused_bytes() -> int:
    """What lies in the list."""
    return _free_bytes


def release() -> None:
    """Hand the blocks that lie unused back to the system."""
    global _free_bytes
    _free.clear()
    _free_bytes = 0


def _round_up(num_bytes: int) -> int:
    """To one of eight sizes between powers of two, so that a block fits the next step's slightly different need."""
    step = 1 << max(num_bytes.bit_length() - 4, 12)
    return -(-num_bytes // step) * step


def _take(size: int) -> Block:
    global _free_bytes
    if _free[size]:
        _free_bytes -= size
        return _free[size].pop()
    return np.empty(size, np.uint8)


def _give_back(block: Block) -> None:
    global _free_bytes
    if _free_bytes + block.size <= _LIMIT:
        _free_bytes += block.size
        _free[block.size].append(block)
