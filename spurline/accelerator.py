"""An accelerator works through a queue: what is queued behind what, and when the host has to wait for it.

On a CPU everything has happened when a call returns: nothing here has any effect there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

stand_in = ""
"""The type of the accelerator that the CPU stands in for; see `cpu_stands_in_for`."""
_stand_in_memory: int | None = None


def acts_as_accelerator(device: torch.device) -> bool:
    """Whether the paths of an accelerator are taken for tensors on this device."""
    return device.type != "cpu" or bool(stand_in)


@contextmanager
def cpu_stands_in_for(accelerator: str, memory_bytes: int | None = None) -> Iterator[None]:
    """Choose the paths of an accelerator for tensors on the CPU: to test and to audit them without one."""
    global stand_in, _stand_in_memory
    before = stand_in, _stand_in_memory
    stand_in, _stand_in_memory = accelerator, memory_bytes
    try:
        yield
    finally:
        stand_in, _stand_in_memory = before


def total_memory(device: torch.device) -> int | None:
    """Bytes of an accelerator's memory; None where nobody can say, and for a CPU, which shares its own."""
    if stand_in and device.type == "cpu":
        return _stand_in_memory
    return _memory_of(device) if _is_accelerator(device) else None


@cache
def _memory_of(device: torch.device) -> int:
    return torch.accelerator.get_memory_info(device)[1]


def _is_accelerator(device: torch.device) -> bool:
    """Whether there is such an accelerator in this machine, with a queue of its own."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


class HostCopy:
    """A small tensor on its way to the host: queued when made, waited for when read. On a CPU the tensor itself."""

    def __init__(self, numbers: Tensor) -> None:
        self._host = numbers.to("cpu", non_blocking=True)  # into pinned memory, from an accelerator
        self._done = record_event(numbers.device)

    def wait(self) -> Tensor:
        """Wait for the copy alone, not for what has been queued behind it."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


def record_event(device: torch.device) -> torch.Event | None:
    """The end of what is queued so far; None where there is no queue."""
    if not _is_accelerator(device):
        return None
    event = torch.Event(device)
    event.record()
    return event


_side_streams: dict[torch.device, torch.Stream] = {}


@contextmanager
def side_stream_behind(event: torch.Event, device: torch.device) -> Iterator[None]:
    """Queue work beside the current stream: behind `event`, but not behind what has been queued since."""
    if device not in _side_streams:
        _side_streams[device] = torch.Stream(device)
    _side_streams[device].wait_event(event)
    with _side_streams[device]:
        yield
