"""Parallelize a single-device model: in place, always in the same order."""

from torch import nn

from spurline.config import Compile
from spurline.moe.layer import MoE
from spurline.parallel.compile import apply_compile
from spurline.parallel.context import Kind, apply_context_parallel
from spurline.parallel.expert import balance_over, parallelize_moe
from spurline.parallel.fsdp import Sharding, apply_fsdp, has_per_param_meshes
from spurline.parallel.mesh import Meshes
from spurline.parallel.remat import apply_remat
from spurline.parallel.tensor import apply_tensor_parallel


def parallelize_model(
    model: nn.Module,
    meshes: Meshes | None,
    remat: str,
    compiled: Compile,
    per_param_mesh: bool | None = None,
    sharding: Sharding | None = None,
    context_kind: Kind = "all_gather",
) -> None:
    """Apply context, tensor and expert parallelism, then per block: activation checkpointing, compile, FSDP2.

    Without meshes, only activation checkpointing and compile.

    per_param_mesh=False makes experts FSDP units of their own, as PyTorch builds without per-parameter meshes require.
    """
    if meshes is not None:
        if meshes.degrees.cp > 1:
            apply_context_parallel(model, meshes.cp_group, context_kind)
        if meshes.degrees.tp > 1:
            apply_tensor_parallel(model, meshes.tp_mesh)
        apply_expert_parallel(model, meshes)
    apply_remat(model, remat)
    if compiled.enable and "model" in compiled.parts:
        # The hooks of an FSDP unit inside a block can't be traced into one graph.
        one_graph = meshes is None or (per_param_mesh is not False and has_per_param_meshes())
        for module in model.modules():
            if not one_graph and isinstance(module, MoE):
                module.dispatcher.overlap = False  # rows in flight must not cross a graph break
        apply_compile(model, compiled.backend, fullgraph=one_graph)
    if meshes is not None:
        apply_fsdp(model, meshes.fsdp_mesh, meshes.expert_fsdp_mesh, per_param_mesh, sharding)


def apply_expert_parallel(model: nn.Module, meshes: Meshes) -> None:
    """Shard the experts of every MoE layer, and set which ranks' tokens are balanced together."""
    degrees = meshes.degrees
    share = degrees.cp * degrees.tp > 1
    balance = meshes.stage_group, meshes.sequence_group if share else None
    for name, moe in model.named_modules():
        if not isinstance(moe, MoE):
            continue
        if degrees.ep * degrees.etp == 1:
            balance_over(moe, *balance)
            continue
        parallelize_moe(
            moe,
            meshes.expert_mesh,
            layer=name,
            reduce_gradients=False,  # FSDP2 does
            same_num_tokens=not share,
            balance=balance,
        )
        if share:
            # cp and tp are the last axes of the dense view, so a rank's share follows from its global rank.
            rank_P = meshes.expert_mesh.mesh.flatten().tolist()
            context_rank_P = [rank // degrees.tp % degrees.cp for rank in rank_P]
            moe.set_sequence_ranks(degrees.tp, [rank % degrees.tp for rank in rank_P], context_rank_P)
