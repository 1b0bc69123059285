"""The ranks of a run, as the trainer sees them: a single process, or many under torchrun."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spurline.config import Parallelism
from spurline.device import is_accelerator, limit_waiting, pick_device, start_process_group, wait_for_all_ranks
from spurline.parallel.degrees import Degrees, resolve_degrees
from spurline.parallel.mesh import Meshes, build_meshes
from spurline.parallel.rendezvous import Meeting, meet, refuse_different_options

_SECONDS_TO_ABANDON = 3.0


@dataclass(frozen=True)
class World:
    device: torch.device
    degrees: Degrees
    meshes: Meshes | None = None
    """None if there is only one rank."""
    host_group: dist.ProcessGroup | None = None
    """All ranks, for collectives on host memory; None if there is only one rank."""
    meeting: Meeting | None = None
    """The rendezvous of the ranks, if `joined_world` has started the process group."""

    @staticmethod
    def alone(device: str = "auto") -> World:
        return World(pick_device(device), Degrees(1, 1, 1, 1, 1))

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that writes files and logs."""
        return self.meshes is None or dist.get_rank() == 0

    @property
    def data_rank(self) -> int:
        """Which of data_size parts of a batch this rank reads."""
        return self.meshes.data_rank if self.meshes is not None else 0

    @property
    def data_size(self) -> int:
        return self.degrees.dp

    @property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks."""
        return self.meshes.world_group if self.meshes is not None else None

    @property
    def stage_group(self) -> dist.ProcessGroup | None:
        """The ranks that have the same layers; each works on its own tokens."""
        return self.meshes.stage_group if self.meshes is not None else None

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The ranks of one pipeline, which have different layers; None without stages."""
        return self.meshes.pp.get_group() if self.meshes is not None and self.meshes.pp is not None else None

    def wait_for_all(self) -> None:
        """Return when every rank has called this, and has done all collectives before."""
        if self.meshes is not None:
            wait_for_all_ranks(self.device)

    def sum_over_data(self, value: Tensor) -> Tensor:
        """Sum over the ranks that read different sequences; ranks that share sequences have the same value."""
        return self._sum(value, self.meshes.batch_group) if self.meshes is not None else value

    def sum_over_losses(self, value: Tensor) -> Tensor:
        """Sum over the ranks whose losses cover different positions, or none; the ranks of a tp group have the same."""
        return self._sum(value, self.meshes.loss_group) if self.meshes is not None else value

    @staticmethod
    def _sum(value: Tensor, group: dist.ProcessGroup) -> Tensor:
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    def __str__(self) -> str:
        axes = {
            name: getattr(self.degrees, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
        }
        shared = ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
        return f"{self.degrees.world} ranks ({shared})" if shared else "1 rank"


@contextmanager
def joined_world(
    parallelism: Parallelism,
    device: str = "auto",
    timeout_seconds: int = 0,
    options: Callable[[], Mapping[str, str]] = dict,
    guarded: Callable[[Meeting | None], AbstractContextManager[object]] = nullcontext,
) -> Iterator[World]:
    """Join the other ranks, if torchrun started any, for as long as the block lasts.

    `device` is the value of training.device (auto, cpu, ...); a collective fails after waiting timeout_seconds (0:
    PyTorch's default) for a rank. A ValueError on all ranks if their `options` differ. `guarded` surrounds all in which
    ranks can wait for each other, from when they have met to the barrier at the end; its meeting is that of the World.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        with guarded(None):
            yield World.alone(device)
        return
    own_device = pick_device(device)
    degrees = resolve_degrees(parallelism, size)
    meeting = None if dist.is_initialized() else meet(timeout_seconds)
    try:
        with guarded(meeting):
            if meeting is not None:
                refuse_different_options(meeting, options())
                start_process_group(own_device, timeout_seconds, meeting.store, meeting.rank, meeting.size)
            meshes = build_meshes(degrees, own_device.type)
            host_group = dist.new_group(backend="gloo") if is_accelerator(own_device) else meshes.world_group
            if timeout_seconds:
                for group in (*meshes.groups(), host_group):
                    # New groups have the default timeout of their backend, not that of the first group.
                    limit_waiting(group, timeout_seconds)
            yield World(own_device, degrees, meshes, host_group, meeting)
            if meeting is not None:
                wait_for_all_ranks(own_device)  # no rank may close connections that another one still uses
        if meeting is not None:
            dist.destroy_process_group()
    except BaseException:
        if meeting is not None and dist.is_initialized():
            _abandon_groups()
        raise


def _abandon_groups() -> None:
    """Destroy the process groups of a run that has failed, so that the other ranks notice.

    They may be inside a collective that this rank will never join, for which the groups of some backends wait; so this
    waits only a few seconds.
    """
    thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
    thread.start()
    thread.join(_SECONDS_TO_ABANDON)
