"""FSDP2 over two meshes: experts are sharded over the ranks that hold the same ones, the rest over all data ranks.

FSDP units are the embedding, every block, the output matrix, and the rest of the model. A unit's weights are gathered
in its compute dtype, so that no module has to cast them; norms and gates stay in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from spurline.comm.gradients import sum_in_fsdp
from spurline.moe.experts.experts import Experts
from spurline.moe.layout import dim_of
from spurline.parallel.blocks import blocks_of


@dataclass(frozen=True)
class Sharding:
    """The dtypes in which weights and gradients are communicated, and which weights stay gathered for backward.

    `default` keeps what the backward pass needs first: the last block, the output matrix, and the rest of the model.
    """

    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    reshard_after_forward: Literal["default", "always", "never"] = "default"

    @property
    def policy(self) -> MixedPrecisionPolicy:
        # Inputs are not cast: activations already have the compute dtype, and rotary tables must stay in float32.
        return MixedPrecisionPolicy(self.param_dtype, self.reduce_dtype, cast_forward_inputs=False)

    def reshards(self, is_needed_first: bool) -> bool:
        """Whether a unit reshards after the forward pass; `is_needed_first`: backward starts with it."""
        return self.reshard_after_forward == "always" or (
            self.reshard_after_forward == "default" and not is_needed_first
        )


def has_per_param_meshes() -> bool:
    """Whether this PyTorch can put the parameters of one module on different meshes."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult  # noqa: F401
    except ImportError:
        return False
    return True


def apply_fsdp(
    model: nn.Module,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh,
    per_param_mesh: bool | None = None,
    sharding: Sharding | None = None,
) -> None:
    """Shard each block, the embedding and the output matrix as a unit of its own, then the rest, in place.

    If PyTorch has per-parameter meshes, a block with experts is one unit; otherwise (or with per_param_mesh=False) its
    experts are a unit of their own, sharded first. Gradients are summed over ranks (`comm/gradients.py`).

    A model whose embedding and output matrix are called as modules returns them from `first_and_last_units()`.
    """
    if per_param_mesh is None:
        per_param_mesh = has_per_param_meshes()
    sharding = sharding or Sharding()
    blocks = blocks_of(model)
    layers = list(model.layers.children()) if hasattr(model, "layers") else blocks  # type: ignore[union-attr]
    for block in blocks:
        reshard = sharding.reshards(is_needed_first=block is layers[-1] if layers else False)
        all_experts = [module for module in block.modules() if isinstance(module, Experts)]
        if not all_experts:
            _shard_unit(block, mesh, sharding, reshard)
        elif per_param_mesh:
            _shard_unit(block, mesh, sharding, reshard, _placement_by_mesh(all_experts, mesh, expert_mesh))
        else:
            for experts in all_experts:
                placements = _expert_placements(experts, expert_mesh.size(-1))
                _shard_unit(experts, expert_mesh, sharding, reshard, placements.__getitem__)
            _shard_unit(block, mesh, sharding, reshard)
    first, last = _first_and_last_units(model)
    if first is not None:
        _shard_unit(first, mesh, sharding, sharding.reshards(is_needed_first=False))
        first.set_unshard_in_backward(False)  # type: ignore[operator]  # its backward needs no weights
    if last is not None:
        _shard_unit(last, mesh, sharding, sharding.reshards(is_needed_first=True))
    _shard_unit(model, mesh, sharding, sharding.reshards(is_needed_first=True))
    _prefetch([unit for unit in (first, *layers, last) if isinstance(unit, FSDPModule)])
    sum_in_fsdp(fsdp_units(model))
    if layers:
        model.register_forward_hook(partial(_free_without_backward, list(fsdp_units(layers[-1]))))


def fsdp_units(model: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def has_separate_expert_units(model: nn.Module) -> bool:
    """Whether experts are FSDP units of their own."""
    return any(isinstance(module, Experts) and isinstance(module, FSDPModule) for module in model.modules())


def _free_without_backward(kept: list[FSDPModule], *_: Any) -> None:
    """Reshard the last block after a forward pass without gradients: no backward pass will.

    Otherwise the next forward pass would not see weights that have changed in between.
    """
    if not torch.is_grad_enabled():
        for unit in kept:
            unit.reshard()


def _first_and_last_units(model: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    named = getattr(model, "first_and_last_units", None)
    return named() if callable(named) else (None, None)


def _prefetch(units: list[FSDPModule]) -> None:
    """Prefetch the next unit's weights while one computes, in forward and backward.

    FSDP2's implicit prefetching relies on a host that runs ahead of the device, but with expert parallelism the host
    waits for the row counts of every layer.
    """
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])


def _shard_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    sharding: Sharding,
    reshard: bool,
    placement: Callable[[nn.Parameter], Any] | None = None,
) -> None:
    """Make a unit of the parameters of `module` that are in no unit yet.

    Modules with `keeps_float32` compute in float32: their weights are gathered unrounded, in a parameter group of their
    own within the unit. In the low dtype they would be rounded, and autograd would save the copies cast back.
    """
    policy = sharding.policy
    parameters = list(_parameters_in_no_unit(module))
    exact = {p for p, in_float32 in parameters if in_float32 and policy.param_dtype != torch.float32}
    if len(exact) == len(parameters):
        policy, exact = MixedPrecisionPolicy(cast_forward_inputs=False), set()
    if exact and not has_per_param_meshes():  # such a build has one group per unit
        exact = set()
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard,
        shard_placement_fn=placement,
        mp_policy=policy,
        ignored_params=exact,
    )
    if exact:
        _add_float32_group(module, [p for p, _ in parameters if p in exact], mesh, reshard)


def _add_float32_group(module: nn.Module, parameters: list[nn.Parameter], mesh: DeviceMesh, reshard: bool) -> None:
    from torch.distributed.fsdp import OffloadPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    state = module._get_fsdp_state()  # type: ignore[operator]
    # The existing group on the same mesh: experts may be on another.
    like = next(group for group in state._fsdp_param_groups if group.mesh_info.mesh == mesh)
    state._fsdp_param_groups.append(
        FSDPParamGroup(
            parameters,
            (module,),
            like.mesh_info,
            like.mesh_info if reshard else None,
            like.device,
            None,
            MixedPrecisionPolicy(cast_forward_inputs=False),
            OffloadPolicy(),
        )
    )


def _parameters_in_no_unit(module: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """The parameters of a module that are in no unit inside it, each once, and whether it stays in float32."""
    seen: set[nn.Parameter] = set()

    def visit(module: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
        for parameter in module.parameters(recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                yield parameter, getattr(module, "keeps_float32", False)
        for child in module.children():
            if not isinstance(child, FSDPModule):
                yield from visit(child)

    return visit(module)


def _placement_by_mesh(
    all_experts: list[Experts], mesh: DeviceMesh, expert_mesh: DeviceMesh
) -> Callable[[nn.Parameter], Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult

    def info(mesh: DeviceMesh) -> FSDPMeshInfo:
        if mesh.ndim == 2:
            return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)

    dense_info = info(mesh)
    # FSDP2 requires one object per set of ranks.
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
    """Shard by expert if that is even; else along the model width, which nothing else shards."""
    placements = {}
    for name, parameter in experts.named_parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        width = dim_of(experts.layout, name, "width")
        by_width = width is not None and part.shape[0] % num_ranks and part.shape[width] % num_ranks == 0
        placements[parameter] = Shard(width if by_width else 0)  # type: ignore[arg-type]
    return placements
