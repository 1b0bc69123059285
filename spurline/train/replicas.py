"""Check that the replicas of a tensor are bitwise identical on all ranks that hold it. N tensors.

Each rank updates its copy by itself, from equal gradients: a bit flip in the memory of one rank, or an update that
differs from the others', stays and grows. Ranks compare a sum of the bit patterns of each tensor, along every mesh axis
that replicates it. The host learns of a difference at the next step, so that it does not wait for this one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spurline.accelerator import HostCopy
from spurline.parallel.world import World
from spurline.train.exit_codes import CopiesDifferError

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Axis:
    """Ranks that hold the same shards of some tensors."""

    name: str
    group: dist.ProcessGroup
    numbers: list[int] = field(default_factory=list)
    """Indices of the tensors."""
    index_n: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """The same on the device: made once, as copying a list makes the host wait."""


class ReplicaCheck:
    """Compares copies every `interval` steps (0: never), and before a checkpoint; all ranks make the same calls."""

    def __init__(self, model: nn.Module, world: World, interval: int) -> None:
        """`model` must be sharded already, and must not have taken a step."""
        self._world = world
        self._interval = interval if world.meshes is not None else 0
        self._names: list[str] = []
        self._tensors: list[Tensor] = []
        self._axes: dict[tuple[str, str], _Axis] = {}
        self._under_way: tuple[int, Tensor, Tensor, HostCopy] | None = None
        self._is_needed = False
        if self._interval:
            self._find(model)

    def check(self, step: int, saving: bool) -> None:
        """After a step: a ValueError if copies differed at the last comparison or, with `saving`, differ now."""
        self.finish()
        if self._is_needed and (saving or step % self._interval == 0):
            self._start(step)
        if saving:
            self.finish()

    def finish(self) -> None:
        """Wait for the comparison in flight, if there is one, and raise a ValueError if copies differ."""
        if self._under_way is None:
            return
        (step, sums_N, differs_N, any_differs), self._under_way = self._under_way, None
        if any_differs.wait().item():
            raise CopiesDifferError(self._describe(step, sums_N.tolist(), differs_N.tolist()))

    def _find(self, model: nn.Module) -> None:
        meshes = self._world.meshes
        assert meshes is not None
        everywhere = [
            ("data", meshes.batch_group),
            ("cp", meshes.cp_group),
            ("tp", meshes.tp_mesh.get_group()),
        ]
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DTensor):
                mesh, names = parameter.device_mesh, parameter.device_mesh.mesh_dim_names or ()
                axes = [
                    (str(names[i]) if names else f"axis {i}", mesh.get_group(i))
                    for i, placement in enumerate(parameter.placements)
                    if placement.is_replicate()
                ]
                self._add(name, parameter, axes)
        state = model.state_dict()
        for name, buffer in model.named_buffers():
            if name in state:
                self._add(name, buffer, everywhere)
        for axis in self._axes.values():
            axis.index_n = torch.tensor(axis.numbers, device=self._world.device)
        # Pipeline stages hold different tensors, and some may hold no copies; all of them still compare together.
        found: list[Any] = [bool(self._axes)] * self._world.degrees.pp
        if meshes.pp is not None:
            dist.all_gather_object(found, bool(self._axes), group=meshes.pp.get_group())
        self._is_needed = any(found)

    def _add(self, name: str, tensor: Tensor, axes: list[tuple[str, dist.ProcessGroup]]) -> None:
        axes = [(axis, group) for axis, group in axes if group.size() > 1]
        if axes:
            self._names.append(name)
            self._tensors.append(tensor)
        for axis, group in axes:
            found = self._axes.setdefault((axis, group.group_name), _Axis(axis, group))
            found.numbers.append(len(self._tensors) - 1)

    @torch.no_grad()
    def _start(self, step: int) -> None:
        sums = [_sum_of_bits(tensor) for tensor in self._tensors]
        sums_N = torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=self._world.device)
        differs_N = torch.zeros_like(sums_N, dtype=torch.bool)
        for axis in self._axes.values():
            sums_n = sums_N[axis.index_n]
            largest = torch.stack([sums_n, ~sums_n])  # ~ reverses the order: one collective finds maximum and minimum
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)
            differs_N.index_put_((axis.index_n,), differs_N[axis.index_n] | (largest[0] != ~largest[1]))
        any_differs = differs_N.any().to(torch.int32)
        dist.all_reduce(any_differs, dist.ReduceOp.MAX, group=self._world.group)
        self._under_way = step, sums_N, differs_N, HostCopy(any_differs)

    def _describe(self, step: int, sums: list[int], differs: list[bool]) -> str:
        """Which tensor differs on which ranks, the same on all ranks."""
        own = [
            (number, self._names[number], axis.name, tuple(dist.get_process_group_ranks(axis.group)), sums[number])
            for axis in self._axes.values()
            for number in axis.numbers
            if differs[number]
        ]
        by_rank: list[Any] = [None] * dist.get_world_size(self._world.host_group)
        dist.all_gather_object(by_rank, own, group=self._world.host_group)
        sums_of: dict[tuple[int, str, str, tuple[int, ...]], dict[int, int]] = defaultdict(dict)
        for rank, found in enumerate(by_rank):
            for *place, its_sum in found:
                sums_of[tuple(place)][rank] = its_sum
        unequal = {place: found for place, found in sums_of.items() if len(set(found.values())) > 1}
        first = min(unequal)
        tensors = {name for _, name, _, _ in unequal}
        more = f", and so do those of {len(tensors) - 1} more tensors" if len(tensors) > 1 else ""
        return (
            f"step {step}: the copies of {first[1]} differ: {_who(unequal[first])} ({first[2]}){more}."
            " The memory or the arithmetic of a rank has failed, or something but the optimizer has changed a tensor."
            " Run the same command to resume from the last checkpoint"
        )


def _who(sums: dict[int, int]) -> str:
    """Which ranks hold values that differ from the others'."""
    usual, count = Counter(sums.values()).most_common(1)[0]
    odd = [rank for rank in sums if sums[rank] != usual]
    if 2 * count <= len(sums):
        return f"ranks {', '.join(map(str, sums))} hold different values"
    others = ", ".join(str(rank) for rank in sums if sums[rank] == usual)
    return f"{'rank' if len(odd) == 1 else 'ranks'} {', '.join(map(str, odd))} against ranks {others}"


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of the bit patterns of this rank's shard, as integers; any single bit flip changes it."""
    own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
    return own.contiguous().view(_BITS[own.dtype.itemsize]).sum(dtype=torch.int64)
