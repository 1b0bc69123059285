"""The ranks of a run seen as two meshes: one for the dense part of a model, one for its experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spurline.parallel.degrees import Degrees


@dataclass(frozen=True)
class Meshes:
    """Two views of one world of ranks, both in the order of the ranks, so that the last axes are neighbours.

    The ranks of a cp group and of a tp group read the same sequences; otherwise each rank reads sequences of its own.
    """

    degrees: Degrees
    world: DeviceMesh
    """All ranks, on one axis."""
    data: DeviceMesh
    """The ranks that read different sequences, on one axis: dp_replicate and dp_shard in one."""
    shares: DeviceMesh
    """Axes data, cp, tp: who shares the positions of which sequences."""
    losses: DeviceMesh
    """The ranks whose losses add up to that of the step, on one axis: data and cp in one."""
    sequence: DeviceMesh
    """The ranks that share the positions of the same sequences, on one axis: cp and tp in one."""
    dense: DeviceMesh
    """Axes dp_replicate, dp_shard, tp. FSDP2 shards over the ranks of a cp group too: dp_shard has them in it."""
    sparse: DeviceMesh
    """Axes dp_replicate, efsdp, ep, etp."""

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Where FSDP2 shards all but the experts: dp_shard (with cp), or with copies dp_replicate and dp_shard."""
        return self._with_copies(self.dense, "dp_shard")

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """Where FSDP2 shards the experts: efsdp, or with copies of the model dp_replicate and efsdp."""
        return self._with_copies(self.sparse, "efsdp")

    @property
    def tp_mesh(self) -> DeviceMesh:
        return self.dense["tp"]

    @property
    def expert_mesh(self) -> DeviceMesh:
        """Where the experts are spread: ep, or with split experts ep and etp."""
        return self.sparse["ep", "etp"] if self.degrees.etp > 1 else self.sparse["ep"]

    @property
    def batch_group(self) -> dist.ProcessGroup:
        """The ranks whose token counts add up to that of the step."""
        return self.data.get_group()

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """The ranks whose losses add up to that of the step: each has that of its own positions."""
        return self.losses.get_group()

    @property
    def cp_group(self) -> dist.ProcessGroup:
        return self.shares.get_group("cp")

    @property
    def sequence_group(self) -> dist.ProcessGroup:
        """The ranks that share the positions of the same sequences."""
        return self.sequence.get_group()

    @property
    def world_group(self) -> dist.ProcessGroup:
        return self.world.get_group()

    @property
    def data_rank(self) -> int:
        """Which of data_size parts of the global batch this rank reads; the same for ranks that share sequences."""
        return self.data.get_local_rank()

    @property
    def data_size(self) -> int:
        return self.degrees.dp

    def groups(self) -> list[dist.ProcessGroup]:
        """Every group of both views, of which some may be the same."""
        views = (self.world, self.shares, self.losses, self.sequence, self.dense, self.sparse)
        return [view.get_group(axis) for view in views for axis in range(view.ndim)]

    def _with_copies(self, view: DeviceMesh, shard_axis: str) -> DeviceMesh:
        # FSDP2 takes a mesh with two axes for copies to average, even if there is only one.
        return view["dp_replicate", shard_axis] if self.degrees.dp_replicate > 1 else view[shard_axis]


def build_meshes(degrees: Degrees, device_type: str) -> Meshes:
    """Make both views of the initialised world, with a process group for each axis; every rank calls it alike."""
    assert degrees.world == dist.get_world_size(), f"{degrees} is not for {dist.get_world_size()} ranks"
    d = degrees
    world = init_device_mesh(device_type, (d.world,), mesh_dim_names=("world",))
    shares = world._unflatten("world", (d.dp, d.cp, d.tp), ("data", "cp", "tp"))
    dense_sizes = d.dp_replicate, d.dp_shard * d.cp, d.tp
    dense = world._unflatten("world", dense_sizes, ("dp_replicate", "dp_shard", "tp"))
    sparse = world._unflatten("world", (d.dp_replicate, d.efsdp, d.ep, d.etp), ("dp_replicate", "efsdp", "ep", "etp"))
    losses, sequence = shares["data"], shares["tp"]
    if d.cp > 1:
        losses = world._unflatten("world", (d.dp * d.cp, d.tp), ("losses", "tp"))["losses"]
        sequence = world._unflatten("world", (d.dp, d.cp * d.tp), ("data", "sequence"))["sequence"]
    return Meshes(
        degrees=d,
        world=world,
        data=shares["data"],
        shares=shares,
        losses=losses,
        sequence=sequence,
        dense=dense,
        sparse=sparse,
    )
