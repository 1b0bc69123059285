"""An optimizer step that the device can skip."""

import torch
from torch import Tensor

from spurline.device import can_skip_fused_adamw
from spurline.train.optimizer.combined import CombinedOptimizer
from spurline.train.optimizer.muon import Muon


def step_unless(failed: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take a step unless `failed`, a number on the device, is 1: then weights and state stay as they are.

    The host does not learn which. An optimizer that can't decide on its device costs a host read.
    """
    if _decides_on_device(optimizer):
        optimizer.found_inf = failed  # type: ignore[attr-defined]  # torch's name, of gradient scalers
        optimizer.step()
    elif not failed.item():
        optimizer.step()


def _decides_on_device(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, CombinedOptimizer):
        return all(map(_decides_on_device, optimizer.parts))
    if isinstance(optimizer, Muon):
        return True
    return all(
        group.get("fused") and can_skip_fused_adamw(parameter.device)
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
