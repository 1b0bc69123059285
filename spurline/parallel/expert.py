"""Expert parallelism: shard the experts of an MoE layer over ranks."""

from dataclasses import asdict
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from spurline.comm.sequence_parallel import SequenceParallel
from spurline.moe.config import MoEConfig
from spurline.moe.dispatch.plan import ExpertRanks, spread_over
from spurline.moe.layer import MoE
from spurline.moe.layout import dim_of


def parallelize_moe(
    moe: MoE,
    ep_mesh: DeviceMesh,
    sequence: DeviceMesh | None = None,
    *,
    layer: str = "moe",
    reduce_gradients: bool = True,
    same_num_tokens: bool = True,
    balance: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] | None = None,
) -> MoE:
    """Shard moe's experts over the ranks of ep_mesh, in place; it is then called as before. Returns moe.

    Every rank passes its own tokens, as many as it likes. Expert weights become DTensors sharded over ep_mesh; the
    rest stays replicated. A second axis of ep_mesh, named etp, splits the hidden width of each expert. `sequence` is a
    mesh of ranks that all pass the same (B, L, D) input: each routes its share of the L positions, and all get the full
    output.

    Gradients are those of the sum of all ranks' losses; with `sequence`, whose ranks share one loss, that loss counts
    once. So the gradients of router and shared experts are summed over ep_mesh in each backward pass. If they are
    reduced elsewhere (FSDP2, DDP), turn that off with reduce_gradients=False.

    Parameters may be replaced afterwards: for a layer on the meta device, call `moe.to_empty(device=...)` and
    `moe.reset_parameters()`.

    `layer` is the layer's name in errors. Forced balance relies on same_num_tokens: pass False if ranks may have
    different numbers of tokens. `balance` is for models whose batches or sequences span more ranks than ep_mesh: the
    two groups of `balance_over`.
    """
    group, parts = _expert_group(ep_mesh)
    sequence_group = _group_of(sequence, "sequence") if sequence is not None else None
    _refuse_impossible(moe.config, group.size() // parts, parts, group, sequence_group)
    dispatcher = spread_over(ExpertRanks(group, layer, parts, same_num_tokens), moe.dispatcher, moe.config.dispatcher)
    everyone = _same_on_all_ranks(moe, group, sequence_group, layer)

    shard_experts(moe, ep_mesh)
    moe.dispatcher = dispatcher
    if sequence_group is not None:
        moe.sequence = SequenceParallel(sequence_group, [rank["sequence_rank"] for rank in everyone])
    balance_over(moe, *(balance or (group, sequence_group)))
    moe.expert_group = group
    moe.sums_gradients = reduce_gradients and group.size() > 1
    # Split sizes are read from tensors, while tracing too.
    torch._dynamo.config.capture_scalar_outputs = True
    # Inductor would move the shared experts' backward before the exchange that it should overlap, to save some memory.
    torch._inductor.config.reorder_for_peak_memory = False
    return moe


def balance_over(moe: MoE, batch: dist.ProcessGroup | None, sequence: dist.ProcessGroup | None) -> None:
    """Set the ranks whose tokens form one batch for the balance loss, and whose positions form one sequence."""
    moe.router.balance_group = sequence if moe.config.aux_loss == "sequence" else batch


def shard_experts(moe: MoE, ep_mesh: DeviceMesh) -> None:
    """Make the expert weights DTensors over ep_mesh: sharded by expert, and by hidden width over a second axis.

    A weight without a hidden axis (the output bias) is replicated over the second axis.
    """
    experts = moe.experts
    if ep_mesh.ndim == 2:
        experts.hidden_shards = ep_mesh.size(1)
    for name, parameter in list(experts.named_parameters()):
        hidden = dim_of(experts.layout, name, "hidden")
        placements = [Shard(0), Replicate() if hidden is None else Shard(hidden)][: ep_mesh.ndim]
        sharded = distribute_tensor(parameter.detach(), ep_mesh, placements, src_data_rank=None)
        setattr(experts, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _expert_group(mesh: DeviceMesh) -> tuple[dist.ProcessGroup, int]:
    """The group of ranks that experts are sharded over, and the number of parts of an expert's hidden width."""
    names = getattr(mesh, "mesh_dim_names", None)
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2 and names is not None and names[1] == "etp":
        return mesh._flatten().get_group(), mesh.size(1)
    return _group_of(mesh, "ep_mesh"), 1


def _group_of(mesh: DeviceMesh, name: str) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(f"{name} must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        axes = f" (axes {', '.join(mesh.mesh_dim_names)})" if mesh.mesh_dim_names else ""
        raise ValueError(f"{name} must have one axis, got {mesh.ndim}{axes}: pick one, as in mesh['ep']")
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name} covers ranks {mesh.mesh.tolist()}, but not this one, rank {dist.get_rank()}")
    return mesh.get_group()


def _refuse_impossible(
    config: MoEConfig, ep: int, parts: int, group: dist.ProcessGroup, sequence_group: dist.ProcessGroup | None
) -> None:
    E, world = config.num_experts, dist.get_world_size()
    if E % ep:
        fitting = [d for d in range(1, E + 1) if E % d == 0 and world % d == 0]
        raise ValueError(
            f"expert parallel degree {ep} does not divide num_experts {E};"
            f" with {world} ranks, degrees that do: {', '.join(map(str, fitting))}"
        )
    if config.hidden_dim % parts:
        raise ValueError(f"expert tensor parallel degree {parts} does not divide hidden_dim {config.hidden_dim}")
    if world % ep:
        raise ValueError(f"expert parallel degree {ep} does not divide the {world} ranks there are")
    if sequence_group is not None:
        inside = set(dist.get_process_group_ranks(group))
        outside = sorted(set(dist.get_process_group_ranks(sequence_group)) - inside)
        if outside:
            raise ValueError(
                f"ranks {outside} share this rank's sequence but are not in ep_mesh (ranks {sorted(inside)}):"
                f" the sequence has to be split among ranks that share experts"
            )


def _same_on_all_ranks(
    moe: MoE, group: dist.ProcessGroup, sequence_group: dist.ProcessGroup | None, layer: str
) -> list[dict[str, Any]]:
    """The settings of every rank of the group; a ValueError on all of them if they don't agree on the layer."""
    mine: dict[str, Any] = {f"config.{key}": value for key, value in asdict(moe.config).items()}
    mine["layer name"] = layer
    mine["sequence ranks"] = 1 if sequence_group is None else sequence_group.size()
    for name, parameter in moe.named_parameters():
        mine[name] = f"{tuple(parameter.shape)} {parameter.dtype}"
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine | {"sequence_rank": _rank_in(sequence_group)}, group=group)
    for rank, theirs in zip(dist.get_process_group_ranks(group), everyone, strict=True):
        for key in sorted(everyone[0].keys() | theirs.keys()):
            first, other = everyone[0].get(key), theirs.get(key)
            if first != other and key != "sequence_rank":
                first_rank = dist.get_process_group_ranks(group)[0]
                raise ValueError(
                    f"{layer}: ranks disagree on {key}: it is {first!r} on rank {first_rank}, {other!r} on rank {rank}"
                )
    return everyone


def _rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else group.rank()
