"""Where a thread is (collective, layer, line), read from its stack by another thread at no cost to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = (
    f"{_TORCH}/distributed/distributed_c10d.py",
    f"{_TORCH}/distributed/_functional_collectives.py",
    f"{_TORCH}/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
)
_OWN_COLLECTIVES = ("spurline/comm/collectives.py", "spurline/comm/exchange.py", "spurline/comm/conservation.py")


class Place(NamedTuple):
    collective: str = ""
    """The function that communicates; empty if the thread does something else."""
    line: str = ""
    """The innermost line outside of torch."""
    layer: str = ""
    """Name of the innermost module that is running, if requested and known."""

    def __str__(self) -> str:
        what = f"in {self.collective}" if self.collective else "not in a collective"
        return what + (f" of {self.layer}" if self.layer else "") + (f", {self.line}" if self.line else "")


def place_of(thread: int, names: Mapping[int, str] | None = None) -> Place:
    """Where the thread with this identifier is.

    `names` are the names of modules by id(). Local variables of functions are inspected only if it is given, because
    that keeps what they hold alive until the function returns.
    """
    frame = sys._current_frames().get(thread)
    frames = list(_outwards(frame))
    own = next((frame for frame in frames if not frame.f_code.co_filename.startswith((_TORCH, "<"))), None)
    collective = ""
    for frame in frames:  # the outermost: barrier, not the all_reduce that implements it
        file = frame.f_code.co_filename
        if file in _COLLECTIVES or file.endswith(_OWN_COLLECTIVES):
            collective = frame.f_code.co_name
        elif collective:
            break
    line = f"{own.f_code.co_name} ({own.f_code.co_filename}:{own.f_lineno})" if own else ""
    return Place(collective, line, _layer(frames, names) if names else "")


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _layer(frames: list[FrameType], names: Mapping[int, str]) -> str:
    """The longest name among the modules in the local variables of the innermost frame that has any."""
    for frame in frames:
        found = []
        for value in frame.f_locals.values():
            # FSDP2's hooks work on a group of parameters, which knows the name of its module.
            is_group = type(value).__name__ == "FSDPParamGroup"
            name = value._module_fqn if is_group else names.get(id(value))
            if isinstance(name, str) and name:
                found.append(name)
        if found:
            return max(found, key=len)
    return ""
