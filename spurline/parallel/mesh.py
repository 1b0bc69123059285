"""The ranks of a run as two meshes: one for the dense part of a model, one for its experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spurline.parallel.degrees import Degrees


@dataclass(frozen=True)
class Meshes:
    """Two views of one world of ranks, both in rank order, so that the ranks of the last axes are neighbors.

    With pipeline stages, views cover the ranks that have the same layers as this one. The ranks of a cp group, of a tp
    group and of a pipeline read the same sequences; other ranks read different ones.
    """

    degrees: Degrees
    world: DeviceMesh
    """All ranks, on one axis."""
    stage: DeviceMesh
    """The ranks that have the same layers, on one axis."""
    pp: DeviceMesh | None
    """The ranks of one pipeline; None without stages."""
    data: DeviceMesh
    """The ranks that read different sequences, on one axis: dp_replicate and dp_shard flattened."""
    shares: DeviceMesh
    """Axes data, cp, tp: which ranks share the positions of which sequences."""
    losses: DeviceMesh
    """The ranks whose losses add up to the step's loss, on one axis: pp, data and cp flattened."""
    sequence: DeviceMesh
    """The ranks that share the positions of the same sequences, on one axis: cp and tp flattened."""
    dense: DeviceMesh
    """Axes dp_replicate, dp_shard, tp. FSDP2 shards over the ranks of a cp group too: dp_shard includes them."""
    sparse: DeviceMesh
    """Axes dp_replicate, efsdp, ep, etp."""

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh of FSDP2 for all but the experts: dp_shard (with cp), or dp_replicate and dp_shard (HSDP)."""
        return self._with_copies(self.dense, "dp_shard")

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """The mesh of FSDP2 for the experts: efsdp, or dp_replicate and efsdp (HSDP)."""
        return self._with_copies(self.sparse, "efsdp")

    @property
    def tp_mesh(self) -> DeviceMesh:
        return self.dense["tp"]

    @property
    def expert_mesh(self) -> DeviceMesh:
        """The mesh that experts are sharded over: ep, or ep and etp."""
        return self.sparse["ep", "etp"] if self.degrees.etp > 1 else self.sparse["ep"]

    @property
    def batch_group(self) -> dist.ProcessGroup:
        """The ranks whose token counts add up to the step's."""
        return self.data.get_group()

    @property
    def loss_group(self) -> dist.ProcessGroup:
        """The ranks whose losses add up to the step's: each rank's loss covers its own positions."""
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
    def stage_group(self) -> dist.ProcessGroup:
        """The ranks that have the same layers."""
        return self.stage.get_group()

    @property
    def data_rank(self) -> int:
        """Which of data_size parts of the global batch this rank reads; the same for ranks that share sequences."""
        return self.data.get_local_rank()

    @property
    def data_size(self) -> int:
        return self.degrees.dp

    def groups(self) -> list[dist.ProcessGroup]:
        """Every group of both views; some may be the same."""
        views = (self.world, self.stage, self.pp, self.shares, self.losses, self.sequence, self.dense, self.sparse)
        return [view.get_group(axis) for view in views if view is not None for axis in range(view.ndim)]

    def _with_copies(self, view: DeviceMesh, shard_axis: str) -> DeviceMesh:
        # FSDP2 treats a mesh with two axes as HSDP, even if there is only one replica.
        return view["dp_replicate", shard_axis] if self.degrees.dp_replicate > 1 else view[shard_axis]


def build_meshes(degrees: Degrees, device_type: str) -> Meshes:
    """Build both views of the initialized world, with a process group for each axis; every rank must call it."""
    assert degrees.world == dist.get_world_size(), f"{degrees} is not for {dist.get_world_size()} ranks"
    d = degrees
    world = init_device_mesh(device_type, (d.world,), mesh_dim_names=("world",))
    by_stage = world._unflatten("world", (d.pp, d.stage), ("pp", "stage")) if d.pp > 1 else None

    def view(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """The ranks of this rank's stage on several axes."""
        return (
            world._unflatten("world", sizes, names)
            if by_stage is None
            else by_stage._unflatten("stage", sizes, names)[names]
        )

    shares = view((d.dp, d.cp, d.tp), ("data", "cp", "tp"))
    losses, sequence = shares["data"], shares["tp"]
    if d.cp > 1 or d.pp > 1:
        losses = world._unflatten("world", (d.pp * d.dp * d.cp, d.tp), ("losses", "tp"))["losses"]
    if d.cp > 1:
        sequence = view((d.dp, d.cp * d.tp), ("data", "sequence"))["sequence"]
    return Meshes(
        degrees=d,
        world=world,
        stage=world if by_stage is None else by_stage["stage"],
        pp=None if by_stage is None else by_stage["pp"],
        data=shares["data"],
        shares=shares,
        losses=losses,
        sequence=sequence,
        dense=view((d.dp_replicate, d.dp_shard * d.cp, d.tp), ("dp_replicate", "dp_shard", "tp")),
        sparse=view((d.dp_replicate, d.efsdp, d.ep, d.etp), ("dp_replicate", "efsdp", "ep", "etp")),
    )
