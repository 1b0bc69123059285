"""Which tensors of a model and its optimizer are in a checkpoint."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from spurline.lora.adapters import is_adapter
from spurline.train.checkpoint.layout import TensorLayout


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers; for a model with adapters, only these (of any pipeline stage)."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    adapters = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
    return adapters if adapters or getattr(model, "has_adapters", False) else tensors


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers except adapters: those of the base model."""
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items() if not is_adapter(name)}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{key}.{name}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def empty_optimizer_tensors(
    saved: Mapping[str, TensorLayout], model: nn.Module, elsewhere: Container[str] = ()
) -> dict[str, Tensor]:
    """Empty tensors for the saved optimizer state; a new optimizer has no state before its first step.

    State of parameters that are in `elsewhere` but not in `model` is left to the ranks that have them.
    """
    parameters = dict(model.named_parameters())
    empty = {}
    for name, entry in saved.items():
        if name.startswith("optimizer."):
            _, key, of = [*name.split(".", 2), "", ""][:3]
            if of not in parameters and of in elsewhere:
                continue
            if of not in parameters:
                raise ValueError(f"the checkpoint has optimizer state {key!r} of {of!r}, which the model does not have")
            # Moments have the shape and sharding of their parameter; the step count is one number.
            if entry.shape == tuple(parameters[of].shape):
                empty[name] = torch.empty_like(parameters[of], dtype=entry.dtype, requires_grad=False)
            elif entry.shape in ((), (1,)):
                empty[name] = torch.empty(entry.shape, dtype=entry.dtype)
            else:
                raise ValueError(f"the checkpoint has optimizer state {key!r} of {of!r} with the shape {entry.shape}")
    return empty


def load_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    state_of: dict[str, dict[str, Tensor]] = {}
    for full_name, tensor in tensors.items():
        _, key, name = full_name.split(".", 2)
        state_of.setdefault(name, {})[key] = tensor
    names = {parameter: name for name, parameter in model.named_parameters()}
    in_order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.load_state_dict(
        {
            "state": {index: state_of[name] for index, name in enumerate(in_order) if name in state_of},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
