"""Traffic of a collective: its size, its group, and the bytes sent within a node and between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._pytree import tree_leaves

from spurline.parallel.mesh import Meshes

# By op name.
_KINDS = {
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "start_exchange": "all-to-all",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
}


@dataclass(frozen=True)
class Collective:
    kind: str
    dtype: str
    num_bytes: int
    """The larger of a rank's input and output."""
    axis: str
    group_size: int
    intra_bytes: float
    """What this rank sends or receives, whichever is more, over the links within its node."""
    inter_bytes: float
    """The same to other nodes."""

    @property
    def label(self) -> str:
        return f"{self.kind} {self.axis}"


class Groups:
    """The process groups of a run by name: their mesh axis, and how many of their ranks are on this rank's node."""

    def __init__(self, meshes: Meshes | None, gpus_per_node: int) -> None:
        self.gpus_per_node = gpus_per_node
        self._axes: dict[str, str] = {}
        self._size_and_neighbors: dict[str, tuple[int, int]] = {}
        if meshes is not None:
            for name, group in _axes_of(meshes):
                self._axes.setdefault(group.group_name, name)

    def axis(self, group: ProcessGroup) -> str:
        return self._axes.get(group.group_name, f"{group.size()} ranks")

    def size_and_neighbors(self, group: ProcessGroup) -> tuple[int, int]:
        """The number of ranks in the group, and how many of them are on this rank's node."""
        name = group.group_name
        if name not in self._size_and_neighbors:
            ranks = dist.get_process_group_ranks(group)
            own = dist.get_rank() // self.gpus_per_node
            neighbors = sum(rank // self.gpus_per_node == own for rank in ranks)
            self._size_and_neighbors[name] = len(ranks), neighbors
        return self._size_and_neighbors[name]


def _axes_of(meshes: Meshes) -> Iterator[tuple[str, ProcessGroup]]:
    """The axes and their groups; if two names have the same ranks, the more specific one comes first."""
    d = meshes.degrees
    views = (
        (meshes.shares, {"cp": d.cp}),
        (meshes.dense, {"dp_shard": d.dp_shard * d.cp, "tp": d.tp, "dp_replicate": d.dp_replicate}),
        (meshes.sparse, {"ep": d.ep, "efsdp": d.efsdp, "etp": d.etp}),
    )
    for mesh, sizes in views:
        for name, size in sizes.items():
            if size > 1:
                yield "dp_shard x cp" if name == "dp_shard" and d.cp > 1 else name, mesh.get_group(name)
    if d.etp > 1:
        yield "ep x etp", meshes.expert_mesh._flatten().get_group()
    if d.cp > 1:
        yield "cp x tp", meshes.sequence_group
        yield "data x cp", meshes.loss_group
    if d.pp > 1 and meshes.pp is not None:
        yield "pp", meshes.pp.get_group()
        yield "stage", meshes.stage_group
        yield "losses", meshes.loss_group
    yield "data", meshes.batch_group
    yield "world", meshes.world_group


def is_collective(op: Any) -> bool:
    name = op.overloadpacket.__name__
    return name in _KINDS and op.namespace in ("c10d", "_c10d_functional", "spurline")


def group_of(args: Sequence[Any]) -> ProcessGroup:
    """The process group among the arguments of a collective, given as an object or by name."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return ProcessGroup.unbox(arg)
        if isinstance(arg, ProcessGroup):
            return arg
    names = [arg for arg in args if isinstance(arg, str) and arg in _known_groups()]
    return _resolve_process_group(names[0])  # type: ignore[arg-type]


def _known_groups() -> set[str]:
    return set(dist.distributed_c10d._world.pg_names.values())


def describe(op: Any, args: Sequence[Any], result: Any, groups: Groups) -> Collective:
    kind = _KINDS[op.overloadpacket.__name__]
    group = group_of(args)
    size, neighbors = groups.size_and_neighbors(group)
    num_nodes = max(1, size // neighbors)
    tensors = [leaf for leaf in tree_leaves(list(args)) if isinstance(leaf, Tensor)]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)] or tensors
    if op.namespace == "c10d" and kind in ("all-gather", "reduce-scatter"):
        outputs, tensors = tensors[:1], tensors[1:]  # ops that write into a given tensor take it first
    num_bytes = max(_bytes(outputs[0]), _bytes(tensors[0]))
    if kind == "all-to-all":
        inside = (neighbors - 1) / size
        intra, inter = num_bytes * inside, num_bytes * (size - neighbors) / size
        if (splits := _splits(args)) is not None:
            intra, inter = _uneven(splits, neighbors, _bytes(tensors[0]) / max(1, tensors[0].shape[0]))
    else:
        # Each byte enters a node once, over the adapters of all its ranks in the group, and then reaches every rank.
        passes = 2 if kind == "all-reduce" else 1
        intra = passes * num_bytes * (neighbors - 1) / neighbors
        inter = passes * num_bytes * (num_nodes - 1) / num_nodes / neighbors
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    return Collective(kind, dtype, num_bytes, groups.axis(group), size, intra, inter)


def _splits(args: Sequence[Any]) -> list[list[int]] | None:
    """Rows sent to and received from each rank: as a host tensor, or as two lists (received first)."""
    for arg in args:
        if isinstance(arg, Tensor) and arg.device.type == "cpu" and arg.dim() == 2 and arg.shape[0] == 2:
            return arg.tolist()
    lists = [arg for arg in args if isinstance(arg, list) and arg and isinstance(arg[0], int)]
    return [lists[1], lists[0]] if len(lists) == 2 else None


def _uneven(splits: list[list[int]], neighbors: int, row_bytes: float) -> tuple[float, float]:
    """Rank 0's bytes within its node and to or from others; its node's ranks come first, starting with itself."""
    intra = max(sum(rows[1:neighbors]) for rows in splits)
    inter = max(sum(rows[neighbors:]) for rows in splits)
    return intra * row_bytes, inter * row_bytes


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
