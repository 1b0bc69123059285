"""Initial values of a layer that is used alone, from torch's default generator. Runs use `models/common/init.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spurline.comm.own_part import keep_own_part
from spurline.lora.adapters import is_adapter


@torch.no_grad()
def draw_parameters(module: Any) -> None:
    """Draw a module's own parameters if it defines `init_parameter`; if not, its constructor has initialized them."""
    if hasattr(module, "init_parameter"):
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                _draw(module, name, parameter)


@torch.no_grad()
def reset(module: Any) -> None:
    """Initialize a module's own parameters and buffers: by its own methods, or by `reset_parameters` as in PyTorch."""
    _refuse_without_initial_values(module)
    if hasattr(module, "init_parameter"):
        draw_parameters(module)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()
    if hasattr(module, "init_buffers"):
        module.init_buffers()


def _draw(module: Any, name: str, parameter: Tensor) -> None:
    fill = module.init_adapter if is_adapter(name) else module.init_parameter
    if not isinstance(parameter, DTensor):
        fill(name, parameter, None)
        return
    # Ranks with the same seed draw the same numbers, and keep different experts.
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    fill(name, whole, None)
    keep_own_part(parameter, whole)


def _refuse_without_initial_values(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        return
    for own, method in (
        (module._parameters, "init_parameter(name, tensor, generator)"),
        (module._buffers, "init_buffers()"),
    ):
        names = [name for name, tensor in own.items() if tensor is not None]
        if names and not hasattr(module, method.partition("(")[0]):
            raise ValueError(
                f"{type(module).__name__} owns {names[0]} but has no initial value for it: give it a method {method},"
                " or reset_parameters()"
            )
