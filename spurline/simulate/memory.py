"""The memory that a device holds at each moment of a step, by holder.

Every storage on the device has a birth, a death and a holder. A moment is the number of ops run before it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spurline.simulate.places import Place

PARAMETERS = "parameters"
OPTIMIZER = "optimizer state"
GRADIENTS = "gradients"
GATHERED = "gathered parameters"
REDUCED = "gradient buffers"
KEPT = "kept for backward"
BATCH = "batch"
TEMPORARY = "temporaries"
HOLDERS = (PARAMETERS, OPTIMIZER, GRADIENTS, BATCH, KEPT, GATHERED, REDUCED, TEMPORARY)
"""Ordered from persistent to transient."""
GRANULE = 512
"""Allocation granularity in bytes."""


@dataclass
class Allocation:
    num_bytes: int
    birth: int
    holder: str
    op: str
    place: Place
    phase: str
    death: int | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""

    def is_alive(self, moment: int) -> bool:
        return self.birth <= moment and (self.death is None or moment < self.death)


class Memory:
    """The storages of one device type."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.moment = 0
        self.all: list[Allocation] = []
        self._live: dict[int, Allocation] = {}

    def add(self, tensor: Tensor, holder: str, op: str, place: Place, phase: str) -> None:
        """Record the storage of a tensor, unless it is known."""
        tensor = local_part(tensor)
        if tensor.device != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or not storage.nbytes():
            return
        made = Allocation(rounded(storage.nbytes()), self.moment, holder, op, place, phase)
        made.shape, made.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.all.append(made)
        self._live[key] = made
        weakref.finalize(storage, self._drop, key)

    def knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._live

    def _drop(self, key: int) -> None:
        if allocation := self._live.pop(key, None):
            allocation.death = self.moment

    def resized(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Record a resize, by which FSDP2 frees and reallocates storages, as the end of an allocation and a new one."""
        key = storage._cdata
        if (known := self._live.get(key)) is None:
            return
        known.death = self.moment
        born = Allocation(rounded(num_bytes), self.moment, known.holder, known.op, known.place, known.phase)
        born.shape, born.dtype = known.shape, known.dtype
        self.all.append(born)
        self._live[key] = born

    def hold(self, tensors: Iterable[Tensor], holder: str) -> None:
        """Set the holder of these tensors, whatever allocated them."""
        for tensor in tensors:
            if known := self._live.get(local_part(tensor).untyped_storage()._cdata):
                known.holder = holder

    def keep(self, phase: str) -> None:
        """Mark tensors that were allocated in this phase and are still alive as kept for backward."""
        for allocation in self._live.values():
            if allocation.phase == phase and allocation.holder == TEMPORARY:
                allocation.holder = KEPT

    def curve(self) -> list[tuple[int, int]]:
        """(moment, bytes held from then on), for each moment at which the total changes."""
        change: Counter[int] = Counter()
        for allocation in self.all:
            change[allocation.birth] += allocation.num_bytes
            if allocation.death is not None:
                change[allocation.death] -= allocation.num_bytes
        total, points = 0, []
        for moment in sorted(change):
            total += change[moment]
            points.append((moment, total))
        return points

    def peak(self) -> tuple[int, int]:
        """The moment of peak memory, and the bytes held then."""
        return max(self.curve(), key=lambda point: (point[1], -point[0]), default=(0, 0))

    def held_at(self, moment: int) -> list[Allocation]:
        return [allocation for allocation in self.all if allocation.is_alive(moment) and allocation.num_bytes]

    def by_holder(self, moment: int) -> dict[str, int]:
        held: Counter[str] = Counter()
        for allocation in self.held_at(moment):
            held[allocation.holder] += allocation.num_bytes
        return {holder: held[holder] for holder in HOLDERS}

    def curves_by_holder(self, num_points: int) -> tuple[list[int], dict[str, list[int]]]:
        """The bytes of each holder at the peak of each of at most num_points stretches of the step."""
        curve = self.curve()
        size = max(1, -(-len(curve) // num_points))
        stretches = [curve[start : start + size] for start in range(0, len(curve), size)]
        moments = [max(stretch, key=lambda point: point[1])[0] for stretch in stretches]
        held = {holder: [0] * len(moments) for holder in HOLDERS}
        for allocation in self.all:
            for index, moment in enumerate(moments):
                if allocation.is_alive(moment):
                    held[allocation.holder][index] += allocation.num_bytes
        return moments, held


def rounded(num_bytes: int) -> int:
    return -(-num_bytes // GRANULE) * GRANULE


def local_part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
