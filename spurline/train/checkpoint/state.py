"""What of a model and its optimizer is in a checkpoint, and whether a checkpoint fits a model."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in model.state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"optimizer.{key}.{name}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def empty_optimizer_tensors(saved: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Room for the optimizer state that was saved; a new optimizer has none until its first step."""
    parameters = dict(model.named_parameters())
    empty = {}
    for name, entry in saved.items():
        if name.startswith("optimizer."):
            parameter, dtype = parameters[name.split(".", 2)[2]], entry.properties.dtype
            # Made like its parameter, moments are sharded as it is; the step count has a shape of its own.
            if entry.size == parameter.shape:
                empty[name] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                empty[name] = torch.empty(entry.size, dtype=dtype)
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


def misfits(saved: dict[str, Any], tensors: dict[str, Tensor]) -> list[str]:
    """One phrase for each tensor that the checkpoint and the model don't share, in the order of their names."""
    found = []
    for name in sorted(tensors.keys() | {name for name in saved if name.startswith("model.")}):
        bare_name = name.removeprefix("model.")
        if name not in saved:
            found.append(f"{bare_name} is not in the checkpoint")
        elif name not in tensors:
            found.append(f"{bare_name} is not in the model")
        elif saved[name].size != tensors[name].shape:
            sizes = tuple(saved[name].size), tuple(tensors[name].shape)
            found.append(f"{bare_name} is {sizes[0]} in the checkpoint, {sizes[1]} in the model")
    return found


def config_differences(old: Any, new: Any, name: str = "model") -> list[str]:
    """The fields of two configs that differ, by their dotted names: `model.dim 16 -> 24`."""
    if isinstance(old, dict) and isinstance(new, dict):
        missing = "(none)"
        return [
            difference
            for field in dict.fromkeys((*old, *new))
            for difference in config_differences(old.get(field, missing), new.get(field, missing), f"{name}.{field}")
        ]
    old, new = json.dumps(old), json.dumps(new)
    return [] if old == new else [f"{name} {old} -> {new}"]


class Staging:
    """Copies of a state on the CPU, in buffers that are used again each time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same state, sharded in the same way, that training does not change any more."""
        copied = {name: self._copy(name, item) if isinstance(item, Tensor) else item for name, item in state.items()}
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return copied

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
        buffer = self._buffers.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, local.dtype):
            pinned = local.device.type != "cpu"
            buffer = self._buffers[name] = torch.empty(local.shape, dtype=local.dtype, pin_memory=pinned)
        buffer.copy_(local, non_blocking=True)
        # `DTensor.from_local` would take the copy back to the mesh's device.
        return DTensor(buffer, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else buffer
