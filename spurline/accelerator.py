"""Streams, events and host copies of accelerators, which work through a queue.

On a CPU, a call is complete when it returns, so nothing here has any effect.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

stand_in = ""
"""The type of the accelerator that the CPU stands in for; see `cpu_stands_in_for`."""
_stand_in_memory: int | None = None


def acts_as_accelerator(device: torch.device) -> bool:
    """Whether tensors on this device take the code paths of an accelerator."""
    return device.type != "cpu" or bool(stand_in)


@contextmanager
def cpu_stands_in_for(accelerator: str, memory_bytes: int | None = None) -> Iterator[None]:
    """Take the code paths of an accelerator for tensors on the CPU, to test and audit them without one."""
    global stand_in, _stand_in_memory
    before = stand_in, _stand_in_memory
    stand_in, _stand_in_memory = accelerator, memory_bytes
    try:
        yield
    finally:
        stand_in, _stand_in_memory = before


def total_memory(device: torch.device) -> int | None:
    """An accelerator's memory in bytes; None if it is unknown, and for a CPU."""
    if stand_in and device.type == "cpu":
        return _stand_in_memory
    return _memory_of(device) if _is_accelerator(device) else None


@cache
def _memory_of(device: torch.device) -> int:
    return torch.accelerator.get_memory_info(device)[1]


def _is_accelerator(device: torch.device) -> bool:
    """Whether this is an accelerator, and this machine has it."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to a device, without waiting for the work that is queued there."""
    return (tensor.pin_memory() if _is_accelerator(device) else tensor).to(device, non_blocking=True)


class _Recomputation(threading.local):
    keeps_host_copies = False


recomputation = _Recomputation()
"""What holds for this thread: while a block is recomputed that kept its copies to the host, they are complete."""


class HostCopy:
    """An asynchronous copy of a small tensor to the host, waited for when read. On a CPU, the tensor itself."""

    def __init__(self, numbers: Tensor) -> None:
        self._host = numbers.to("cpu", non_blocking=True)  # into pinned memory, from an accelerator
        self._done = None if recomputation.keeps_host_copies else record_event(numbers.device)

    def wait(self) -> Tensor:
        """Wait only for the copy, not for work queued after it."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def record_event(device: torch.device) -> torch.Event | None:
    """An event at the end of the work queued so far; None if there is no queue."""
    if not _is_accelerator(device):
        return None
    event = torch.Event(device)
    event.record()
    return event


_side_streams: dict[torch.device, torch.Stream] = {}


@contextmanager
def side_stream_behind(event: torch.Event, device: torch.device) -> Iterator[None]:
    """Queue work on a side stream: after `event`, but not after work queued since on the current stream."""
    if device not in _side_streams:
        _side_streams[device] = torch.Stream(device)
    _side_streams[device].wait_event(event)
    with _side_streams[device]:
        yield
