"""Build a model's optimizer: AdamW, or Muon and AdamW as one, over the parameter groups of the config."""

from typing import Any

import torch
from torch import nn
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from spurline.config import Optimizer
from spurline.train.optimizer.adamw import ShardedAdamW
from spurline.train.optimizer.combined import CombinedOptimizer
from spurline.train.optimizer.groups import parameter_groups
from spurline.train.optimizer.muon import Muon

STATE = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "muon": {"momentum_buffer"}}
"""The state that each optimizer keeps for a parameter."""


def build_optimizer(model: nn.Module, config: Optimizer) -> torch.optim.Optimizer:
    """The optimizer of the model's trainable parameters; see parameter_groups for which parameter gets what."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for group in parameter_groups(model, config):
        groups.setdefault(group["optimizer"], []).append(group)
    made: list[torch.optim.Optimizer] = []
    if of_adamw := groups.get("adamw"):
        # By default, torch updates CPU parameters one small operation at a time, many times slower.
        fused_devices = _get_fused_kernels_supported_devices()
        fused = all(p.device.type in fused_devices for group in of_adamw for p in group["params"])
        made.append(ShardedAdamW(of_adamw, fused=fused))
    if of_muon := groups.get("muon"):
        made.append(
            Muon(
                of_muon,
                nesterov=config.nesterov,
                ns_steps=config.ns_steps,
                ns_dtype=None if config.ns_dtype == "auto" else getattr(torch, config.ns_dtype),
                adjust_lr=config.adjust_lr,
            )
        )
    optimizer = made[0] if len(made) == 1 else CombinedOptimizer(made)
    optimizer.register_load_state_dict_pre_hook(_refuse_state_of_another_optimizer)
    return optimizer


def _refuse_state_of_another_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    index = 0
    for group in optimizer.param_groups:
        kept = STATE[group["optimizer"]]
        for _ in group["params"]:
            state = saved["state"].get(index, {}).keys()
            index += 1
            if state and state != kept:
                raise ValueError(
                    f"the checkpoint was written with another optimizer: it has {', '.join(sorted(state))} where"
                    f" {group['optimizer']} keeps {', '.join(sorted(kept))}. Use the --optimizer.name and"
                    " --optimizer.groups it was written with, or another --job.dump_folder"
                )
