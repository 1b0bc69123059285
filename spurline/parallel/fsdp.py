"""FSDP2 over two meshes: experts are sharded over the ranks that hold the same ones, the rest over all data ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from spurline.moe.experts.experts import Experts
from spurline.moe.layout import dim_of
from spurline.parallel.blocks import blocks_of


def has_per_param_meshes() -> bool:
    """Whether this PyTorch can put the parameters of one module on different meshes."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult  # noqa: F401
    except ImportError:
        return False
    return True


def apply_fsdp(model: nn.Module, mesh: DeviceMesh, expert_mesh: DeviceMesh, per_param_mesh: bool | None = None) -> None:
    """Shard every block of the model by itself, then the rest, in place.

    Where PyTorch has per-parameter meshes, a block with experts is one unit; elsewhere (or with per_param_mesh=False)
    its experts are a unit of their own, sharded first. Gradients are summed over ranks, not averaged: our losses
    already are parts of one mean over all tokens.
    """
    if per_param_mesh is None:
        per_param_mesh = has_per_param_meshes()
    for block in blocks_of(model):
        all_experts = [module for module in block.modules() if isinstance(module, Experts)]
        if not all_experts:
            fully_shard(block, mesh=mesh)
        elif per_param_mesh:
            fully_shard(block, mesh=mesh, shard_placement_fn=_placement_by_mesh(all_experts, mesh, expert_mesh))
        else:
            for experts in all_experts:
                placements = _expert_placements(experts, expert_mesh.size(-1))
                fully_shard(experts, mesh=expert_mesh, shard_placement_fn=placements.__getitem__)
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def has_separate_expert_units(model: nn.Module) -> bool:
    """Whether experts were sharded by a call of their own."""
    return any(isinstance(module, Experts) and isinstance(module, FSDPModule) for module in model.modules())


def _placement_by_mesh(
    all_experts: list[Experts], mesh: DeviceMesh, expert_mesh: DeviceMesh
) -> Callable[[nn.Parameter], Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    def info(mesh: DeviceMesh) -> FSDPMeshInfo:
        if mesh.ndim == 2:
            return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)

    dense_info = info(mesh)
    # FSDP2 wants one object for one set of ranks.
    expert_info = dense_info if torch.equal(mesh.mesh, expert_mesh.mesh) else info(expert_mesh)
    of_experts: dict[nn.Parameter, Shard] = {}
    for experts in all_experts:
        of_experts |= _expert_placements(experts, expert_mesh.size(-1))

    def placement(parameter: nn.Parameter) -> ShardPlacementResult:
        if parameter in of_experts:
            return ShardPlacementResult(of_experts[parameter], expert_info)
        return ShardPlacementResult(Shard(0), dense_info)

    return placement


def _expert_placements(experts: Experts, num_ranks: int) -> dict[nn.Parameter, Shard]:
    """By expert where they can be shared evenly; else along the model width, by which nothing else is split."""
    placements = {}
    for name, parameter in experts.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        width = dim_of(experts.layout, name, "width")
        by_width = width is not None and part.shape[0] % num_ranks and part.shape[width] % num_ranks == 0
        placements[parameter] = Shard(width if by_width else 0)  # type: ignore[arg-type]
    return placements
