"""Gradient reduction: which gradient is summed over which ranks, and by what. All rules are listed here.

| weight | its gradient on a rank covers | summed over ranks by |
| --- | --- | --- |
| in an FSDP2 unit: all that the trainer trains | this rank's tokens | FSDP2, over the unit's mesh (`sum_in_fsdp`) |
| replicated over an axis of its DTensor (tp, etp) | this rank's positions or heads | `local`, over that axis |
| plain, after `parallelize_moe` of a bare layer | this rank's tokens | `call_replicated`, over the layer's group |
| sharded over ep or etp: experts | all rows that reached this rank | nothing over these axes: it is complete |
| on the first and last pipeline stage: tied embeddings | its own stage | `PipelinedModel`, after the last backward |

A weight may be in several rows: the gate of a router under FSDP2 with tp is summed by `local` over tp, then by FSDP2
over the data ranks, which include those of context parallelism. Gradients are summed, never averaged: each rank's loss
is its part of one mean over all tokens of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from spurline.comm.collectives import copy_to_group

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def local(weight: Tensor) -> Tensor:
    """This rank's shard of a weight as a plain tensor: called once, at the start of the module that uses it.

    The ranks of an axis over which a weight is replicated see different tokens, or different heads of the same tokens:
    each computes a partial gradient, and the backward pass sums them.
    """
    if not isinstance(weight, DTensor):
        return weight
    part = weight.to_local()
    for axis, placement in enumerate(weight.placements):
        if placement.is_replicate():
            part = copy_to_group(part, weight.device_mesh.get_group(axis))
    return part


def call_replicated(group: dist.ProcessGroup, module: nn.Module, *args: Any) -> Any:
    """Call a module that is replicated over the group; the backward pass sums the gradients of its parameters.

    Nothing is attached to the parameters, so they may be replaced: by `to_empty`, by `load_state_dict(assign=True)`, or
    in a copy of the module.
    """
    if not torch.is_grad_enabled():
        return module(*args)
    weights = {name: copy_to_group(parameter, group) for name, parameter in module.named_parameters()}
    return functional_call(module, weights, args)


def sum_in_fsdp(units: Iterable[FSDPModule]) -> None:
    """Make FSDP2 sum the gradients of these units over their meshes, where its default is the mean."""
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no AVG or PREMUL_SUM


def reduce_gradients(model: nn.Module, enabled: bool) -> None:
    """Set whether FSDP2 reduces the gradients of the next backward pass or accumulates them locally."""
    from torch.distributed.fsdp import FSDPModule  # a layer alone does not need it

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
